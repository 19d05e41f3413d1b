"""Local AdamW steps with the cohort's second moment: FedAdamW (Liu et al., AAAI 2026, arXiv
2510.27486).

    local step k    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
                    w ← w − η (m̂/(√v̂ + ε) + α Δ + λ w)
                    with m̂ = m/(1 − β₁ᵏ) and v̂ = v/(1 − β₂ᵗ)
    server          Δ, FedCM's mean local step of the last round
                    v̄, the mean of the clients' last v

In each round m starts at 0 and v at v̄; t counts the steps of all rounds. A block of the paper is a
tensor here: clients send the mean of each tensor's v. λ is the client's weight decay. The authors'
code sends v in full and clips at 10.
"""

from typing import Any

import torch

from gcfed.federated.parts import (
    ClientStack,
    ClientStates,
    Download,
    Method,
    Prepared,
    Round,
    per_client,
)
from gcfed.methods.momentum.fedcm import MeanStep
from gcfed.methods.momentum.fedmuon import MeanMomentum, MomentumSteps
from gcfed.methods.requirements import uniform_weights
from gcfed.utils.checked import ShareBelow1, Weight, checked


@checked
class FedAdamW(Method):
    """Replaces each client's gradients by Adam's steps plus α Δ; ``beta1``, ``beta2``, ``eps``: β₁,
    β₂, ε.
    """

    def __init__(
        self,
        alpha: Weight = 0.5,
        *,
        beta1: ShareBelow1 = 0.9,
        beta2: ShareBelow1 = 0.999,
        eps: Weight = 1e-8,
    ) -> None:
        super().__init__(AdamSteps(alpha, beta1, beta2, eps), MeanStep(), MeanMoment("fedadamw"))


class AdamSteps(MomentumSteps):
    recordable = "run"
    message = "fedadamw"

    def __init__(self, alpha: float, beta1: float, beta2: float, eps: float) -> None:
        self.alpha = alpha
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        """m and v, ``[K, *shape]``, k and t, ``[K]``, all edited by the steps, and
        Δ, ``[*shape]``.
        """
        means = download.extra["fedadamw"]
        directions = download.extra["fedcm"]
        n = len(stack)
        m = {name: t.new_zeros(n, *t.shape) for name, t in directions.items()}
        v = {name: zeros + means[name] for name, zeros in m.items()}
        k = means["t"].new_zeros(n)
        return {"m": m, "v": v, "k": k, "t": means["t"].repeat(n), "directions": directions}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        prepared = stack.prepared[self]
        k = prepared["k"][: stack.active].add_(1)
        t = prepared["t"][: stack.active].add_(1)
        grads, m, v, directions = stack.with_grads(
            prepared["m"], prepared["v"], prepared["directions"]
        )
        torch._foreach_lerp_(m, grads, 1 - self.beta1)
        torch._foreach_mul_(v, self.beta2)
        torch._foreach_addcmul_(v, grads, grads, value=1 - self.beta2)
        first = 1 / (1 - self.beta1**k)
        second = (1 - self.beta2**t).rsqrt()
        for g, m_n, v_n in zip(grads, m, v, strict=True):
            g.copy_(m_n * per_client(first, g) / (v_n.sqrt() * per_client(second, g) + self.eps))
        torch._foreach_add_(grads, directions, alpha=self.alpha)

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        prepared = stack.prepared[self]
        v = {name: t.reshape(len(stack), -1) for name, t in prepared["v"].items()}
        # the mean of no entries is NaN
        means = {name: t.mean(1) if t.numel() else t.sum(1) for name, t in v.items()}
        self._sent = means | {"t": prepared["t"].clone()}


class MeanMoment(MeanMomentum):
    """v̄ and t, one number each."""

    needs = [uniform_weights("v̄ is the plain mean of the clients' second moments")]

    def on_broadcast(self, download: Download, round: Round) -> None:
        zero = {name: round.broadcast_model[name].new_zeros(()) for name in self.trained_names}
        self.shared = self.server_state("v", zero | {"t": next(iter(zero.values()))})
        download.extra[self.message] = self.shared
