"""Variance reduction on the server: FedVARP (Jhunjhunwala et al., UAI 2022, Algorithm 1).

    update         v = y + mean_{k∈S} (Δ_k − y_k)
    server's table y_k⁺ = Δ_k for k ∈ S;   y⁺ = y + (|S|/N) · mean_{k∈S} (Δ_k − y_k)

y_k is client k's last update and y the mean of all y_k. This reduces the variance from partial
participation. Clients train as in FedAvg. The paper divides Δ_k by η_l τ and multiplies v by it.
With equal steps and a constant rate this is the same as here, where y_k is the update itself.
"""

import torch

from gcfed.federated.parts import (
    Fact,
    KeptState,
    Params,
    Received,
    Round,
    ServerPart,
    Upload,
    like_trained,
    per_client,
)
from gcfed.methods.requirements import mean_aggregator


class FedVARP(ServerPart):
    """Uses each client's last update in the rounds that it misses."""

    facts = {Fact.CORRECTS_DRIFT, Fact.EDITS_MEAN}
    keeps = {"fedvarp": KeptState(like_trained)}
    needs = [mean_aggregator("y is the plain mean of the table", uniform=True)]

    def on_receive(self, upload: Upload, round: Round) -> None:
        """Replaces Δ_k by Δ_k − y_k. A client whose numbers are not finite keeps its y_k."""
        like = self.trained(round.broadcast_model)
        table = self.stores.read("fedvarp", upload.clients, like)
        new = {}
        for name, old in table.items():
            is_finite = per_client(upload.finite, old)
            new[name] = torch.where(is_finite, upload.delta[name], old)
            upload.delta[name] = new[name] - old
        self.stores.write("fedvarp", upload.clients, new, round.index)

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        news = self.trained(update)  # mean (Δ_k − y_k)
        mean = list(self.server_state("y", news).values())
        change = torch._foreach_mul(list(news.values()), round.num_finite / round.num_clients)
        torch._foreach_add_(list(news.values()), mean)
        torch._foreach_add_(mean, change)
