"""Batch normalisation that stays on the client: FedBN (Li et al., ICLR 2021, Algorithm 1);
``model.norm_policy=local``.

A client trains with the statistics, scales and shifts from its last round, instead of the broadcast
ones. In the paper clients do not send them. Here the global model is tested and needs some: it gets
the aggregate of the last cohort's, without Global GC.
"""

from collections.abc import Mapping

from gcfed.federated.parts import (
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    KeptState,
    Params,
    Setup,
)
from gcfed.methods.requirements import plain_server
from gcfed.models.own import batch_norms
from gcfed.utils.refusal import Refusal


class LocalNorm(ClientPart):
    """Keeps some tensors on the client.

    A subclass chooses other tensors, and must name its own store in ``keeps``.
    """

    method = "model.norm_policy=local"
    keeps = {
        "batch_norm": KeptState(
            lambda part, download: {name: download.broadcast_model[name] for name in part.kept},
            starts_at_model=True,
        )
    }
    needs = [plain_server("the global model has the mean of the clients' batch norms")]

    def personal_tensors(self, setup: Setup) -> list[str]:
        """The names of the tensors to keep. Tensors that do not travel are equal on all clients."""
        layers = batch_norms(setup.module.net)
        return [name for name in setup.module.net.state_dict() if name.rpartition(".")[0] in layers]

    def validate(self, setup: Setup) -> None:
        for part in setup.parts:
            if {Fact.CORRECTS_DRIFT, Fact.ANCHORS} & part.facts:
                raise Refusal(
                    f"{self.title} does not combine with {part.title}, which compares a client with"
                    " the broadcast model: clients start from other values."
                )

    def bind(self, setup: Setup) -> None:
        self.kept = [name for name in self.personal_tensors(setup) if name in setup.module.travels]

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        for kept in own.values():
            for name, t in kept.items():
                stack.full[name].copy_(t)
        return {}

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params]:
        """A diverged client keeps its old values."""
        return {store: {name: stack.full[name] for name in self.kept} for store in self.keeps}
