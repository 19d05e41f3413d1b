"""SAM on the server: FedGloSS (Caldarola et al., CVPR 2025), with FedDyn's regularization.

    clients' start    w̃ = w − ρ d/‖d‖
    server's model    w⁺ = w + mean_{k∈S} (w_k − w̃) − h/α

d is the mean update of the last round; in the first round w̃ = w. −d is the server's estimate of
its gradient, so w̃ lies up the loss. Clients train from w̃ with FedDyn's terms, and with
:class:`~gcfed.methods.sharpness.sam.Sam`. The authors' code raises both ρ from a small value over
the first rounds, and divides the sum in h by the size of the cohort once more.
"""

import torch

from gcfed.federated.parts import Download, Fact, Method, Order, Params, Received, Round
from gcfed.methods.correction.feddyn import DynamicPull, UpdateSum
from gcfed.methods.estimates import along
from gcfed.methods.requirements import plain_server
from gcfed.utils.checked import Positive, Weight, checked


@checked
class FedGloSS(Method):
    """FedDyn from a point up the global loss; ``rho`` is ρ, ``alpha`` FedDyn's α,
    1/β in the paper.
    """

    def __init__(self, rho: Weight = 0.15, *, alpha: Positive = 0.1) -> None:
        super().__init__(DynamicPull(alpha), AscentSum(rho))


class AscentSum(UpdateSum):
    facts = {Fact.MOVES_START, Fact.EDITS_MEAN}
    order = Order.MOVES_WEIGHTS
    needs = [
        plain_server("it computes the next model itself", any_start=True),
        *UpdateSum.needs[1:],
    ]

    def __init__(self, rho: float) -> None:
        super().__init__()
        self.rho = rho

    def on_broadcast(self, download: Download, round: Round) -> None:
        model = self.trained(round.server_model)
        self.last = self.server_state("last", model)
        moves = along([t.unsqueeze(0) for t in self.last.values()], -self.rho)
        for name, move in zip(model, moves, strict=True):
            download.broadcast_model[name] = model[name] + move.squeeze(0)

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        torch._foreach_copy_(list(self.last.values()), [update[name] for name in self.last])
        super().on_aggregate_end(update, round)
