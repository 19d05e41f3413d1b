"""Dynamic regularization: FedDyn (Acar et al., ICLR 2021, Algorithm 1).

    local objective   L_k(w) − ⟨h_k, w⟩ + α/2 ‖w − w₀‖²
    client's state    h_k⁺ = h_k − α Δ_k                      Δ_k = w_k − w₀
    server's state    h⁺ = h − α (1/N) Σ_{k∈S} Δ_k
    server's model    w⁺ = mean_{k∈S} w_k − h⁺/α

Kept are the sums of updates u_k = −h_k/α and u = −h/α, so α enters in one place: a client's gradient gets
α (w − (w₀ − u_k)), a proximal term around a shifted point, and the update is mean Δ_k + u. Client state: u_k. Server
state: u, the mean of all u_k. Bytes: those of the model. The term enters as its gradient; ``train/loss`` reports the
task's loss alone. One α for all clients, as in the paper; its authors' code divides it by a client's share of the data.
"""

import torch
from lightning.pytorch import LightningModule, Trainer

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.method import ClientPart, Method, ServerPart, Setup
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.methods.requirements import exact_store, plain_server, uniform_mean
from gcfed.utils.number import choice, number


class FedDyn(Method):
    """Adds −h_k + α (w − w₀) to each client's gradients, and −h/α to the aggregated update.

    Args:
        alpha: α > 0. At 0 it would still not be FedAvg, since h/α does not depend on α.
        divide_by: what the sum in h is divided by: ``clients``, N; or ``authors``, |S|², as in GC-Fed's published code
            (h ← h − α/|S| · mean Δ), so h moves N/|S|² times as far: 4 times for 5 of 100 clients, as far for 10 of
            100.

    Raises:
        ValueError: α is not positive; unknown ``divide_by``.
    """

    def __init__(self, alpha: float = 0.1, *, divide_by: str = "clients") -> None:
        choice("methods.feddyn.divide_by", divide_by, ("clients", "authors"))
        pull = DynamicPull(number("methods.feddyn.alpha", alpha, 0, above=True))
        super().__init__(pull, UpdateSum(by_clients=divide_by == "clients"))


class DynamicPull(ClientPart):
    """What clients do: pull towards w₀ − u_k, and add their update to u_k."""

    graphable = True
    corrects_drift = True

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._own: Params = {}
        self._anchor: Params = {}

    def validate(self, setup: Setup) -> None:
        self.names = setup.names
        self.store = setup.stores.open("feddyn")
        exact_store(self.store, "FedDyn")

    def on_clients_start(self, stack: ClientStack, download: Download) -> None:
        start = {name: download.model[name] for name in self.names}
        self._own = self.store.read(stack.clients, start)
        anchor = torch._foreach_neg(list(self._own.values()))
        torch._foreach_add_(anchor, list(start.values()))
        self._anchor = dict(zip(self.names, anchor, strict=True))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stack = self.stack
        names, grads = zip(*stack.named_grads(), strict=True)
        with torch.no_grad():
            anchors = [self._anchor[name][: stack.active] for name in names]
            pull = torch._foreach_sub([stack.leaves[name] for name in names], anchors)
            torch._foreach_add_(list(grads), pull, alpha=self.alpha)

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        self._anchor = {}

    def on_sent(self, upload: Upload, download: Download) -> None:
        """Each client adds the Δ_k that the server got from it, so that u stays the mean of the u_k."""
        self.store.move(upload.clients, self._own, upload.delta, upload.finite, download.round)
        self._own = {}


class UpdateSum(ServerPart):
    """What the server does: add u, the mean of all u_k, to the mean update."""

    def __init__(self, by_clients: bool) -> None:
        self.by_clients = by_clients

    def validate(self, setup: Setup) -> None:
        plain_server(setup, "FedDyn", "it sets the model itself, to the mean of the clients' minus h/α")
        uniform_mean(setup, "FedDyn", "h is the plain mean of the clients' states")
        self.names = setup.names

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        mean = [update[name] for name in self.names]
        total = list(self.server_state("u", {name: update[name] for name in self.names}).values())
        n = round.num_finite
        torch._foreach_add_(total, mean, alpha=n / round.num_clients if self.by_clients else 1 / n)
        torch._foreach_add_(mean, total)
