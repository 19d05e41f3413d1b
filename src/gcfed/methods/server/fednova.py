"""Normalised averaging: every client's update counts as one average local step.

FedNova (Wang et al., NeurIPS 2020, eq. 5 with wᵢ = pᵢ). State: none. Bytes: those of the model.
"""

import torch

from gcfed.federated.parts import (
    Fact,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
    per_client,
)
from gcfed.methods.estimates import step_counter
from gcfed.methods.requirements import local_sgd, uniform_weights
from gcfed.utils.device import on_device


class FedNova(ServerPart):
    """Δ ← τ̄ · mean_k Δ_k / τ_k, with τ_k client k's number of local steps and τ̄ its mean over the
    cohort.

    With local momentum, τ_k is the paper's ‖a_k‖₁, the number of plain steps that move as far.
    """

    facts = {Fact.EDITS_MEAN}
    needs = [
        local_sgd("it counts steps", momentum=True),
        uniform_weights("τ̄ is the plain mean over clients"),
    ]

    def bind(self, setup: Setup) -> None:
        self.count = step_counter(setup.local_optimizer_probe)

    def sums(self, round: Round) -> Params:
        return {"steps": round.zeros()}  # Σ τ_k over the clients of all processes

    def on_receive(self, upload: Upload, round: Round) -> Params:
        tau_K = on_device(self.count(upload.num_steps), upload.finite.device, torch.float64)
        for name in self.trained_names:  # running statistics are no steps
            upload.delta[name].div_(per_client(tau_K, upload.delta[name]))
        return {"steps": (tau_K * upload.finite).sum()}  # added to the sums

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        mean = float(round.sums[self]["steps"]) / round.num_finite
        torch._foreach_mul_(list(self.trained(update).values()), mean)
