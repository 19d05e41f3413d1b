"""Sharpness-aware local steps: FedSAM (Qu et al., ICML 2022, Algorithm 1; Caldarola et al., ECCV 2022).

w̃ = w + ρ g/‖g‖ with g = ∇F_k(w), then w ← w − η ∇F_k(w̃), both on the same mini-batch: a step costs two passes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.method import Batch, ClientPart, ClientStack, Order, Params, Setup
from gcfed.federated.training.stack import client_norms, per_client
from gcfed.utils.checked import Weight, checked


@checked
class Sam(ClientPart):
    """Computes each client's gradient at w + ρ g/‖g‖. g is its objective's gradient; the norm is over all tensors.

    The objective is the task's loss plus the losses that other methods add. Terms that methods add to the gradient
    (Proximal, SCAFFOLD, …) are computed at w and do not change g. Running statistics come from the pass at w.

    Args:
        rho: ρ. 0.5 is FedSAM's value in FedSOL's code, which has the same local solver.
    """

    recordable = "run"
    order = Order.MOVES_WEIGHTS

    def __init__(self, rho: Weight = 0.5) -> None:
        self.rho = rho

    def validate(self, setup: Setup) -> None:
        movers = [part.title for part in setup.parts if isinstance(part, ClientPart) and part.moves_weights]
        if len(movers) > 1:
            raise ValueError(f"methods: {' and '.join(movers)} both move the weights of a local step: keep one.")

    def before_step(self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]) -> None:
        moves = self.perturbation(stack, batch, objective)
        self._unmoved: Params = {name: t[: stack.active].clone() for name, t in stack.full.items()}
        with torch.no_grad():
            torch._foreach_add_(list(stack.leaves.values()), list(moves))

    def perturbation(self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]) -> Sequence[Tensor]:
        """How far to move the weights ``stack.leaves``, ``[n, *shape]`` each."""
        return along(list(stack.gradients(objective()).values()), self.rho)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Puts the weights back, bit for bit, before any other method sees them."""
        stack = pl_module.clients
        with torch.no_grad():
            moved = [stack.full[name][: stack.active] for name in self._unmoved]
            torch._foreach_copy_(moved, list(self._unmoved.values()))
        self._unmoved = {}


def along(grads: Sequence[Tensor], length: float | Tensor) -> list[Tensor]:
    """Scales each client's gradient to the norm ``length``, a number or ``[n]``, over all its tensors."""
    scale = length / client_norms(grads).clamp(min=1e-12)
    return [g * per_client(scale, g) for g in grads]
