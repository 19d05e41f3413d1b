"""Clients that agree on the direction of SAM's move: FedSMOO (Sun et al., ICML 2023, Algorithm 1),
without its FedDyn.

    local step        ŝ = ρ d/‖d‖ with d = ∇F_k(w) − μ_k − s
                      μ_k ← μ_k + ŝ − s
                      w ← w − η ∇F_k(w + ŝ)
    server's move     s⁺ = ρ m/‖m‖ with m = mean_{k∈S} (μ_k − ŝ), of each client's last step

Clients send Δ_k and μ_k − ŝ, the server sends w and s. The authors' code leaves −ŝ out of m. The
dynamic regularization of w is :class:`~gcfed.methods.correction.feddyn.FedDyn`, a method of its
own.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gcfed.federated.parts import (
    Batch,
    ClientStack,
    ClientStates,
    Download,
    KeptState,
    Method,
    Params,
    Prepared,
    Received,
    Upload,
    like_trained,
)
from gcfed.methods.estimates import along
from gcfed.methods.requirements import full_uploads, uniform_weights
from gcfed.methods.shared_tensors import SharedTensors
from gcfed.methods.sharpness.sam import Sam
from gcfed.utils.checked import Positive, checked


@checked
class DualSam(Method):
    """Computes each client's gradient at w + ŝ and keeps μ_k and s up to date; ``rho`` is ρ, the
    norm of ŝ and s.
    """

    def __init__(self, rho: Positive = 0.1) -> None:
        super().__init__(DualMove(rho), CommonMove(rho))


class DualMove(Sam):
    recordable = "run"
    keeps = {"fedsmoo": KeptState(like_trained)}  # μ_k
    needs = [full_uploads("its dual variables would still be sent in full")]

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        """The steps edit μ_k and ŝ, ``[K, *shape]``, and read s, ``[*shape]``."""
        dual = own["fedsmoo"]
        move = {name: torch.zeros_like(t) for name, t in dual.items()}
        return {"dual": dual, "move": move, "common": download.extra["fedsmoo"]}

    def perturbation(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> Sequence[Tensor]:
        prepared = stack.prepared[self]
        dual = [prepared["dual"][name][: stack.active] for name in stack.leaves]
        move = [prepared["move"][name][: stack.active] for name in stack.leaves]
        common = [prepared["common"][name] for name in stack.leaves]
        grads = list(stack.gradients(objective()).values())
        direction = torch._foreach_sub(torch._foreach_sub(grads, dual), common)
        torch._foreach_copy_(move, along(direction, self.rho))
        torch._foreach_add_(dual, torch._foreach_sub(move, common))
        return move

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        prepared = stack.prepared[self]
        self._dual = {name: t.clone() for name, t in prepared["dual"].items()}
        self._sent = {name: dual - prepared["move"][name] for name, dual in self._dual.items()}

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        upload.send("fedsmoo", self._sent)

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        return {"fedsmoo": self._dual}


class CommonMove(SharedTensors):
    """s, which all clients get."""

    needs = [uniform_weights("s follows the plain mean of what the clients send")]

    def __init__(self, rho: float) -> None:
        super().__init__("fedsmoo")
        self.rho = rho

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        mean = [round.extra_means[self.message][name].unsqueeze(0) for name in self.shared]
        moves = [move.squeeze(0) for move in along(mean, self.rho)]
        torch._foreach_copy_(list(self.shared.values()), moves)
