"""Tensors of the network that each client keeps from round to round."""

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
from gcfed.utils.refusal import Refusal

#: What a part of :class:`KeptTensors` keeps, under a name of its own.
KEPT = KeptState(
    lambda part, download: {name: download.broadcast_model[name] for name in part.kept},
    starts_at_model=True,
)


class KeptTensors(ClientPart):
    """Clients train with their own values of some tensors, instead of the broadcast ones.

    A subclass chooses the tensors in ``personal_tensors``, and declares ``keeps = {…: KEPT}``.
    Tensors that do not travel are equal on all clients.
    """

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
