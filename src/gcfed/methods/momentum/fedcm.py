"""Client-level momentum: FedCM (Xu et al. 2021, arXiv 2106.10874).

Δ is the mean local step of the last round's cohort, as a gradient: ``Δ = −mean_k(w_k − w) / (η_l
τ)``, with the mean number τ of local steps. In the first round Δ is 0 and steps are α times as long
as FedAvg's. Momentum builds up over 1/α rounds. Weight decay is added after the scaling by α and is
also part of Δ. So in the long run it is 1/α times as strong as in FedAvg.
"""

from typing import Any

import torch

from gcfed.federated.parts import (
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    Method,
    Params,
    Received,
    Round,
    ServerPart,
    Upload,
)
from gcfed.methods.requirements import local_sgd, mean_aggregator
from gcfed.utils.checked import PositiveShare, checked
from gcfed.utils.device import on_device


@checked
class FedCM(Method):
    """Mixes the last round's direction Δ into each local gradient, ``g ← α g + (1 − α) Δ``.

    Args:
        alpha: α, weight of the client's gradient; 1 is FedAvg. The paper uses 0.1.
    """

    def __init__(self, alpha: PositiveShare = 0.1) -> None:
        super().__init__(ClientMomentum(alpha), MeanStep())


class ClientMomentum(ClientPart):
    recordable = "run"
    facts = {Fact.CORRECTS_DRIFT}
    needs = [local_sgd("its Δ is the momentum and must be the mean of plain SGD steps")]

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        return download.extra["fedcm"]

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        grads, direction = stack.with_grads(stack.prepared[self])
        torch._foreach_lerp_(grads, direction, 1 - self.alpha)


class MeanStep(ServerPart):
    facts = {Fact.EDITS_MEAN, Fact.ONE_RATE}
    needs = [
        mean_aggregator(
            "with other weights Δ is not the mean of local steps and can grow", uniform=True
        )
    ]

    def on_broadcast(self, download: Download, round: Round) -> None:
        like = self.trained(round.broadcast_model)
        self.direction = self.server_state("delta", like)
        download.extra["fedcm"] = self.direction

    def sums(self, round: Round) -> Params:
        return {"steps": round.zeros()}

    def on_receive(self, upload: Upload, round: Round) -> Params:
        num_steps = on_device(upload.num_steps, upload.finite.device)
        return {"steps": (upload.finite * num_steps).sum()}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        # of the clients that are in the mean
        steps = float(round.sums[self]["steps"]) / round.num_finite
        direction = list(self.direction.values())
        torch._foreach_copy_(direction, list(self.trained(update).values()))
        torch._foreach_mul_(direction, -1 / (round.lr * steps))
