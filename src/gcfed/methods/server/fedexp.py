"""A longer server step where clients disagree: FedExP (Jhunjhunwala et al., ICLR 2023, Algorithm
1).

    w⁺ = w + η Δ    with η = max(1, Σ_k ‖Δ_k‖² / (2 M (‖Δ‖² + ε)))

M clients have the mean update Δ. The global model, which is tested and saved, is the average θ =
(w⁺ + w)/2 of the last two iterates, as in the paper: successive iterates may oscillate. Clients
start at w = 2 θ − w_before. The server keeps w_before. The authors' code has M ε instead of ε and
lowers it from round to round. Its first model is w⁺ without an average.
"""

import torch

from gcfed.federated.parts import (
    Download,
    Fact,
    Order,
    Params,
    Received,
    Round,
    ServerPart,
    Upload,
    client_norms,
)
from gcfed.methods.requirements import mean_aggregator, plain_server
from gcfed.utils.checked import Weight, checked


@checked
class FedExP(ServerPart):
    """Lengthens the server's step, and averages the last two iterates; ``epsilon`` is ε, which
    limits η.
    """

    facts = {Fact.MOVES_START, Fact.EDITS_MEAN}
    order = Order.MOVES_WEIGHTS
    needs = [
        mean_aggregator("η is for the plain mean of the updates", uniform=True),
        plain_server("it computes the next model itself", any_start=True),
    ]

    def __init__(self, epsilon: Weight = 1e-3) -> None:
        self.epsilon = epsilon

    def on_broadcast(self, download: Download, round: Round) -> None:
        theta = self.trained(round.server_model)
        self.before = list(self.server_state("before", theta, zeros=False).values())
        doubled = torch._foreach_mul(list(theta.values()), 2.0)
        self.iterate = torch._foreach_sub(doubled, self.before)
        download.broadcast_model |= dict(zip(theta, self.iterate, strict=True))

    def sums(self, round: Round) -> Params:
        return {"squares": round.zeros()}  # Σ_k ‖Δ_k‖²

    def on_receive(self, upload: Upload, round: Round) -> Params:
        deltas = [upload.delta[name].double() for name in self.trained_names]
        square_K = client_norms(deltas).square()
        return {"squares": square_K.where(upload.finite, 0.0).sum()}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        """Makes Δ the step of θ: (η Δ + w − w_before) / 2."""
        deltas = list(self.trained(update).values())
        square = client_norms([delta.double().unsqueeze(0) for delta in deltas]).square()
        eta = round.sums[self]["squares"] / (2 * round.num_finite * (square + self.epsilon))
        torch._foreach_mul_(deltas, float(eta.clamp(min=1.0)))
        torch._foreach_add_(deltas, torch._foreach_sub(self.iterate, self.before))
        torch._foreach_mul_(deltas, 0.5)
        torch._foreach_copy_(self.before, self.iterate)
