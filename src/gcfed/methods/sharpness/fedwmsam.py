"""Momentum, control variates and moves ahead of the client: FedWMSAM (Li et al., NeurIPS 2025,
arXiv 2511.22080).

    momentum        Δ_k = Δ + α/(1 − α) (c − c_k), with FedCM's Δ and SCAFFOLD's c and c_k
    local step b    w ← w − η (α ∇F_k(w̃) + (1 − α) Δ_k), for b = 0, 1, …
                    with w̃ = w + ρ d/‖d‖ and d = w₀ + b Δ_k − w
    weight          α⁺ = 0.99 α + 0.01 clip(mean_{k∈S} v_k, 0.1, 0.9)
                    with v_k = 1 + cos(w_k − w₀, Δ)

Δ and Δ_k have the sign of gradients, so d points up the loss. v_k is small where the update follows
the momentum, and 0 if Δ = 0. The rule of α is that of the authors' code. This code moves along −d,
by one number per tensor: see ``reproductions/constant_moves.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.parts import (
    Batch,
    ClientStack,
    ClientStates,
    Download,
    Method,
    Params,
    Prepared,
    Received,
    Round,
    Upload,
    per_client,
)
from gcfed.methods.correction.scaffold import ControlVariates, MeanVariate
from gcfed.methods.estimates import along
from gcfed.methods.momentum.fedcm import MeanStep
from gcfed.methods.requirements import local_sgd
from gcfed.methods.sharpness.sam import Sam
from gcfed.utils.checked import Inside, Weight, checked


@checked
class FedWMSAM(Method):
    """Mixes each client's momentum into its gradients, which it computes ahead of its weights.

    ``rho`` is ρ, ``alpha`` the α of the first round.
    """

    def __init__(self, rho: Weight = 0.01, *, alpha: Inside = 0.1) -> None:
        super().__init__(OwnMomentum(rho), MeanVariate(), WeightedMeanStep(alpha))


class OwnMomentum(ControlVariates, Sam):
    recordable = "run"
    needs = [
        local_sgd("its Δ is the momentum and must be the mean of plain SGD steps"),
        *ControlVariates.needs,
    ]

    def __init__(self, rho: float) -> None:
        Sam.__init__(self, rho)
        self.two_passes = False
        self.momentum_correction = False

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        """(1 − α) Δ_k, α, and b/(1 − α), which each step increases."""
        alpha = download.extra["fedwmsam"]["alpha"]
        variates = super().prepare(stack, own, download)
        mixed = {}
        for name, mean in download.extra["fedcm"].items():
            mixed[name] = (1 - alpha) * mean + alpha * variates[name]
        return {"mixed": mixed, "alpha": alpha, "ahead": alpha.new_zeros(len(stack))}

    def perturbation(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> Sequence[Tensor]:
        prepared = stack.prepared[self]
        ahead = prepared["ahead"][: stack.active]
        weights = []
        targets = []
        for name, leaf in stack.leaves.items():
            weights.append(leaf.detach())
            move = per_client(ahead, leaf) * prepared["mixed"][name][: stack.active]
            targets.append(stack.broadcast_model[name] + move)
        directions = torch._foreach_sub(targets, weights)
        ahead.add_(1 / (1 - prepared["alpha"]))
        return self.move(directions)

    def move(self, directions: Sequence[Tensor]) -> Sequence[Tensor]:
        """ρ d/‖d‖ of each client, ``[n, *shape]`` each."""
        return along(directions, self.rho)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        Sam.on_after_backward(self, trainer, pl_module)
        stack = pl_module.clients
        prepared = stack.prepared[self]
        grads, mixed = stack.with_grads(prepared["mixed"])
        torch._foreach_mul_(grads, prepared["alpha"])
        torch._foreach_add_(grads, mixed)


class WeightedMeanStep(MeanStep):
    def __init__(self, alpha: float) -> None:
        self.first = alpha

    def on_broadcast(self, download: Download, round: Round) -> None:
        super().on_broadcast(download, round)
        like = next(iter(self.direction.values()))
        self.change = self.server_state("alpha", {"change": like.new_zeros(())})["change"]
        download.extra["fedwmsam"] = {"alpha": self.first + self.change}

    def sums(self, round: Round) -> Params:
        return super().sums(round) | {"values": round.zeros()}

    def on_receive(self, upload: Upload, round: Round) -> Params:
        num_clients = len(upload.clients)
        deltas = [upload.delta[name].reshape(num_clients, -1) for name in self.direction]
        delta_KP = torch.cat(deltas, 1)
        direction_P = torch.cat([step.flatten() for step in self.direction.values()])
        cosine_K = torch.cosine_similarity(delta_KP, direction_P.unsqueeze(0))
        value_K = (1 + cosine_K).where(direction_P.any() & upload.finite, 0.0)
        return super().on_receive(upload, round) | {"values": value_K.double().sum()}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        super().on_aggregate_end(update, round)
        value = (round.sums[self]["values"] / round.num_finite).clamp(0.1, 0.9)
        self.change.add_(0.01 * (value - self.first - self.change).to(self.change.dtype))
