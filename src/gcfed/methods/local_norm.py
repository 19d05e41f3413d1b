"""Batch normalisation that stays on the client: FedBN (Li et al., ICLR 2021, Algorithm 1); ``model.norm_policy=local``.

A client trains with the statistics, scales and shifts from its last round, instead of the broadcast ones. In the paper
clients do not send them. Here the global model is tested and needs some: it gets the aggregate of the last cohort's,
without Global GC.
"""

from collections.abc import Mapping

from torch import nn

from gcfed.federated.method import ClientPart, ClientStack, Download, Kept, Own, Params, Setup
from gcfed.methods.requirements import plain_server
from gcfed.models.own import batch_norms


class LocalNorm(ClientPart):
    method = "model.norm_policy=local"
    keeps = {"batch_norm": Kept(lambda part, download: {n: download.model[n] for n in part.kept}, starts_at_model=True)}
    needs = [plain_server("the global model has the mean of the clients' batch norms")]

    def validate(self, setup: Setup) -> None:
        if others := [part.title for part in setup.parts if {"corrects drift", "anchors"} & part.facts]:
            raise ValueError(
                f"{self.method} does not combine with {others[0]}, which compares a client with the broadcast model: "
                "clients start from other values. Choose average, fixed or group."
            )
        travels = setup.module.travels  # frozen entries are equal on all clients
        self.kept = [name for name in _of_batch_norms(setup.module.net) if name in travels]

    def prepare(self, stack: ClientStack, own: Own, download: Download) -> Params:
        for name, t in own["batch_norm"].items():
            stack.full[name].copy_(t)
        return {}

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params]:
        """A diverged client keeps its old values."""
        return {"batch_norm": {name: stack.full[name] for name in self.kept}}


def no_steps(setup: Setup) -> set[str]:
    """Entries of Δ that are no optimizer steps and often larger: running statistics, and entries that clients keep."""
    kept = any(isinstance(part, LocalNorm) for part in setup.parts)
    return {*setup.module.travels} - {*setup.names} | {*(_of_batch_norms(setup.module.net) if kept else ())}


def _of_batch_norms(net: nn.Module) -> list[str]:
    layers, tensors = batch_norms(net), net.state_dict()
    return [n for n in tensors if n.rpartition(".")[0] in layers]
