"""Momentum, control variates and moves ahead of the client: FedWMSAM (Li et al., NeurIPS 2025,
arXiv 2511.22080).

    momentum        Δ_k = Δ + α/(1 − α) (c − c_k), with FedCM's Δ and SCAFFOLD's c and c_k local
    step b    w̃ = w + ρ d/‖d‖ with d = w₀ + b Δ_k − w, and w ← w − η (α ∇F_k(w̃) + (1 − α) Δ_k); b
    = 0, 1, … weight          α⁺ = 0.99 α + 0.01 clip(mean_{k∈S} v_k, 0.1, 0.9) with v_k = 1 +
    cos(w_k − w₀, Δ)

Δ and Δ_k have the sign of gradients, so d points up the loss. v_k is small where the update follows
the momentum, and 0 if Δ = 0. The rule of α is that of the authors' code, which moves along −d, by
one number per tensor: ``constant``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.network.rows import per_client
from gcfed.federated.parts import (
    Batch,
    ClientStack,
    Download,
    Method,
    Own,
    Params,
    Received,
    Round,
    Upload,
)
from gcfed.methods.correction.scaffold import ControlVariates, MeanVariate
from gcfed.methods.estimates import along, along_ones
from gcfed.methods.momentum.fedcm import MeanStep
from gcfed.methods.requirements import local_sgd
from gcfed.methods.sharpness.sam import Sam
from gcfed.utils.checked import Inside, Weight, checked


@checked
class FedWMSAM(Method):
    """Mixes each client's momentum into its gradients, which it computes ahead of its weights.

    ``rho`` is ρ, ``alpha`` the α of the first round; ``constant`` moves as the authors' code does.
    """

    def __init__(self, rho: Weight = 0.01, *, alpha: Inside = 0.1, constant: bool = False) -> None:
        super().__init__(OwnMomentum(rho, constant), MeanVariate(), WeightedMeanStep(alpha))


class OwnMomentum(ControlVariates, Sam):
    recordable = "run"
    needs = [
        local_sgd("its Δ is the momentum and must be the mean of plain SGD steps"),
        *ControlVariates.needs,
    ]

    def __init__(self, rho: float, constant: bool) -> None:
        Sam.__init__(self, rho)
        self.constant, self.momentum_correction, self.two_passes = constant, False, False

    def prepare(self, stack: ClientStack, own: Own, download: Download) -> Params:
        """(1 − α) Δ_k, α, and b/(1 − α), which each step increases."""
        alpha, variates = download.extra["fedwmsam"]["alpha"], super().prepare(stack, own, download)
        mixed = {
            n: (1 - alpha) * mean + alpha * variates[n]
            for n, mean in download.extra["fedcm"].items()
        }
        return mixed | {"/alpha": alpha, "/ahead": alpha.new_zeros(len(stack))}

    def perturbation(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> Sequence[Tensor]:
        tensors, n = stack.prepared[self], stack.active
        ahead, weights = (
            tensors["/ahead"][:n],
            {name: w.detach() for name, w in stack.leaves.items()},
        )
        targets = [
            stack.start[name] + per_client(ahead, w) * tensors[name][:n]
            for name, w in weights.items()
        ]
        directions = torch._foreach_sub(targets, list(weights.values()))
        ahead.add_(1 / (1 - tensors["/alpha"]))
        return (
            along_ones(torch._foreach_neg(directions), self.rho)
            if self.constant
            else along(directions, self.rho)
        )

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        Sam.on_after_backward(self, trainer, pl_module)
        stack = pl_module.clients
        grads, mixed = stack.with_grads(stack.prepared[self])
        torch._foreach_mul_(grads, stack.prepared[self]["/alpha"])
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
        deltas_KP = torch.cat(
            [upload.delta[name].reshape(len(upload.clients), -1) for name in self.direction], 1
        )
        m_P = torch.cat([m.flatten() for m in self.direction.values()])
        values = (1 + torch.cosine_similarity(deltas_KP, m_P.unsqueeze(0))).where(
            m_P.any() & upload.finite, 0.0
        )
        return super().on_receive(upload, round) | {"values": values.double().sum()}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        super().on_aggregate_end(update, round)
        value = (round.sums[self]["values"] / round.num_finite).clamp(0.1, 0.9)
        self.change.add_(0.01 * (value - self.first - self.change).to(self.change.dtype))
