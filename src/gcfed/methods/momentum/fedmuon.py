"""Local steps along orthogonal matrices: FedMuon (Liu et al. 2025, arXiv 2510.27403).

    local step    M ← β M + g,   w ← w − η ((1 − α) UVᵀ + α Δ)    with M = UΣVᵀ
    server        Δ, FedCM's mean local step of the last round
                  M̄, the mean of the clients' last M

A client's M starts at M̄. Newton and Schulz's iteration with torch.optim.Muon's coefficients
approximates UVᵀ, as in the authors' code. A weight ``[out, in, …]`` is a matrix of its outputs.
Tensors with one axis step along M itself. The authors' code trains these with Adam, adds Nesterov's
step, and lengthens the steps of tall matrices by √(out/in).
"""

from typing import Any

import torch
from torch import Tensor

from gcfed.federated.parts import (
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    Method,
    Order,
    Params,
    Prepared,
    Received,
    Upload,
)
from gcfed.methods.momentum.fedcm import MeanStep
from gcfed.methods.requirements import full_uploads, local_sgd, uniform_weights
from gcfed.methods.shared_tensors import SharedTensors
from gcfed.utils.checked import Share, ShareBelow1, checked


@checked
class FedMuon(Method):
    """Replaces each client's gradients by orthogonal matrices, mixed with Δ; ``momentum`` is β,
    ``alpha`` α.
    """

    def __init__(self, momentum: ShareBelow1 = 0.98, *, alpha: Share = 0.5) -> None:
        super().__init__(MomentumSteps(momentum, alpha), MeanStep(), MeanMomentum("fedmuon"))


class MomentumSteps(ClientPart):
    recordable = "run"
    facts = {Fact.CORRECTS_DRIFT}
    order = Order.PROJECTS  # after GC: nothing may change the step
    needs = [
        local_sgd("its steps have their own momentum"),
        full_uploads("its momentum would still be sent in full"),
    ]
    message = "fedmuon"

    def __init__(self, momentum: float, alpha: float) -> None:
        self.momentum = momentum
        self.alpha = alpha

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        """M, ``[K, *shape]``, which the steps edit, and Δ, ``[*shape]``."""
        momenta = {}
        for name, mean in download.extra["fedmuon"].items():
            momenta[name] = mean.expand(len(stack), *mean.shape).clone()
        return {"momenta": momenta, "directions": download.extra["fedcm"]}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        prepared = stack.prepared[self]
        grads, momenta, directions = stack.with_grads(prepared["momenta"], prepared["directions"])
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, grads)
        torch._foreach_copy_(grads, [orthogonal(m) if m.dim() > 2 else m for m in momenta])
        torch._foreach_lerp_(grads, directions, self.alpha)

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        self._sent = {name: t.clone() for name, t in stack.prepared[self]["momenta"].items()}

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        upload.send(self.message, self._sent)


def orthogonal(momentum: Tensor) -> Tensor:
    """UVᵀ of each client's matrix, ``[n, out, …]``, in one product for all clients."""
    x = momentum.flatten(2)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).reshape(momentum.shape)


class MeanMomentum(SharedTensors):
    """M̄, with which all clients start."""

    needs = [uniform_weights("M̄ is the plain mean of the clients' momenta")]

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        means = [round.extra_means[self.message][name] for name in self.shared]
        torch._foreach_copy_(list(self.shared.values()), means)
