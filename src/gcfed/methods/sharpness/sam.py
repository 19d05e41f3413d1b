"""Sharpness-aware local steps: w ← w − η ∇F_k(w̃), with w̃ = w + ρ d/‖d‖ and a direction d.

    own            d = ∇F_k(w) on the same batch: FedSAM (Qu et al., ICML 2022, Algorithm 1;
                   Caldarola et al. 2022)
    last_update    d = w_old − w₀: FedLESAM (Fan et al., ICML 2024, Algorithm 1)

``own`` takes two passes per step, ``last_update`` one. w_old is the model that the client last
received; in its first round w_old = w₀ and w̃ = w. FedLESAM's published code moves differently: see
``reproductions/constant_moves.py``.

FedSpeed (Sun et al., ICLR 2023, Algorithm 1) steps along α ∇F_k(w̃) + (1 − α) ∇F_k(w). Its code has
α = 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gcfed.federated.parts import (
    Batch,
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    KeptState,
    Order,
    Params,
    Prepared,
    Upload,
    like_trained,
)
from gcfed.methods.estimates import along
from gcfed.utils.checked import PositiveShare, SettingError, Weight, checked

Direction = Literal["own", "last_update"]


@checked
class Sam(ClientPart):
    """Computes each client's gradient at w + ρ d/‖d‖; the norm is over all tensors.

    F_k includes the losses of other methods. What methods add to the gradient (Proximal, SCAFFOLD,
    …) is computed at w and does not change d. Running statistics come from the first pass.

    Args:
        rho: ρ. 0.5 is FedSAM's value in FedSOL's code, which has the same local solver.
        alpha: α, the weight of the gradient at w̃; below 1 only with ``own``.
    """

    recordable = "run"
    order = Order.MOVES_WEIGHTS

    def __init__(
        self, rho: Weight = 0.5, *, direction: Direction = "own", alpha: PositiveShare = 1.0
    ) -> None:
        if alpha < 1 and direction != "own":
            raise SettingError(
                "alpha",
                f"={alpha} needs direction=own: direction={direction} has no gradient at w.",
            )
        self.rho = rho
        self.direction = direction
        self.alpha = alpha
        self.two_passes = direction == "own"
        if direction != "own":
            self.keeps = {"sam": KeptState(like_trained, starts_at_model=True)}  # w_old

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared | None:
        """Returns ρ d/‖d‖ if it is the same in all steps."""
        if self.direction == "own":
            return None
        back = {name: old - stack.broadcast_model[name] for name, old in own["sam"].items()}
        moves = along(list(back.values()), self.rho)
        return dict(zip(back, moves, strict=True))

    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None:
        moves = self.perturbation(stack, batch, objective)
        if self.two_passes:  # the first has updated the running statistics, so they come back too
            stack.settle()
        back = stack.full if self.two_passes else stack.leaves
        self._unmoved: Params = {name: stack.full[name][: stack.active].clone() for name in back}
        with torch.no_grad():
            torch._foreach_add_(list(stack.leaves.values()), list(moves))

    def perturbation(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> Sequence[Tensor]:
        """How far to move the weights ``stack.leaves``, ``[n, *shape]`` each."""
        if self.direction != "own":
            return [move[: stack.active] for move in stack.prepared[self].values()]
        self._at_w = stack.gradients(objective())
        return along(list(self._at_w.values()), self.rho)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Puts the weights back, bit for bit, before any other method sees them."""
        stack = pl_module.clients
        if self.two_passes:
            stack.settle()
        with torch.no_grad():
            moved = [stack.full[name][: stack.active] for name in self._unmoved]
            torch._foreach_copy_(moved, list(self._unmoved.values()))
        if self.alpha < 1:
            grads, at_w = stack.with_grads(self._at_w)
            torch._foreach_lerp_(grads, at_w, 1 - self.alpha)
        if self.two_passes:
            stack.load_counters()
        self._unmoved = {}
        self._at_w = {}

    def keep(
        self, upload: Upload, own: ClientStates, download: Download
    ) -> Mapping[str, Params] | None:
        return {
            name: {n: download.broadcast_model[n].expand_as(t) for n, t in old.items()}
            for name, old in own.items()
        }
