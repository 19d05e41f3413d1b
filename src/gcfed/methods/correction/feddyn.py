"""Dynamic regularization: FedDyn (Acar et al., ICLR 2021, Algorithm 1).

    local objective   L_k(w) − ⟨h_k, w⟩ + α/2 ‖w − w₀‖²
    client's state    h_k⁺ = h_k − α Δ_k                      Δ_k = w_k − w₀
    server's state    h⁺ = h − α (1/N) Σ_{k∈S} Δ_k
    server's model    w⁺ = mean_{k∈S} w_k − h⁺/α

The code stores the sums of updates u_k = −h_k/α and u = −h/α, so α appears once. A client adds α (w
− (w₀ − u_k)) to its gradient, a proximal term around a shifted point. The update is mean Δ_k + u,
and u is the mean of all u_k. ``train/loss`` contains the task's loss only. All clients have the
same α, as in the paper. The authors' code divides it by a client's share of the data.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from gcfed.federated.parts import (
    ClientStack,
    ClientStates,
    Download,
    Fact,
    KeptState,
    Method,
    Params,
    Prepared,
    Received,
    ServerPart,
    Upload,
    like_trained,
)
from gcfed.methods.objective.proximal import Proximal
from gcfed.methods.requirements import mean_aggregator, plain_server
from gcfed.utils.checked import Positive, checked


@checked
class FedDyn(Method):
    """Adds −h_k + α (w − w₀) to each client's gradients, and −h/α to the aggregated update.

    Args:
        alpha: α, strength of the regularization. 0 would not give FedAvg, because h/α does not
            depend on α.
        divide_by: divisor of the sum in h: ``clients``, N; or ``authors``, |S|², as in GC-Fed's
            published code (h ← h − α/|S| · mean Δ). h then moves N/|S|² times as far: 4 times for 5
            of 100 clients, equally far for 10 of 100.
    """

    def __init__(
        self, alpha: Positive = 0.1, *, divide_by: Literal["clients", "authors"] = "clients"
    ) -> None:
        super().__init__(DynamicPull(alpha), UpdateSum(by_clients=divide_by == "clients"))


class DynamicPull(Proximal):
    recordable = "run"
    facts = {Fact.ANCHORS, Fact.CORRECTS_DRIFT}
    keeps = {"feddyn": KeptState(like_trained)}  # h_k, as −h_k/α

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        sums = own["feddyn"]
        return {
            "anchor": {name: download.broadcast_model[name] - total for name, total in sums.items()}
        }

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        """Adds the Δ_k that the server received, so that u stays the mean of the u_k."""
        return {"feddyn": own.add("feddyn", upload.delta, upload.finite)}


class UpdateSum(ServerPart):
    """Adds u, the mean over all clients of the sums of their updates."""

    facts = {Fact.EDITS_MEAN}
    needs = [
        plain_server("it sets the model to the clients' mean plus a state"),
        mean_aggregator("its state is the plain mean of the clients' states", uniform=True),
    ]

    def __init__(self, *, by_clients: bool = True) -> None:
        self.by_clients = by_clients

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        mean = self.trained(update)
        total = self.server_state("u", mean)
        share = 1 / round.num_finite
        if self.by_clients:
            share = round.num_finite / round.num_clients
        torch._foreach_add_(list(total.values()), list(mean.values()), alpha=share)
        torch._foreach_add_(list(mean.values()), list(total.values()))
