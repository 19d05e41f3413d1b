"""Tensors that stay on the client: FedPer (Arivazhagan et al. 2019) and LG-FedAvg (Liang et al.
2020), Algorithms 1.

FedPer keeps the head of the network, LG-FedAvg its body. Clients train the whole network. Personal
tensors are never sent or counted. They begin with the server's initial values, in FedPer's paper at
random.

Which model is tested: ``test/*`` is the global model, whose personal tensors have their initial
values: no client uses it. ``personal/local_*`` (``metrics=personal``) is each client's model after
local training, on its own test split.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from gcfed.federated.parts import (
    ClientStates,
    Download,
    Fact,
    Method,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
)
from gcfed.methods.personal import OWN_MODELS
from gcfed.methods.personal.kept import KEPT, KeptTensors
from gcfed.utils.checked import checked
from gcfed.utils.refusal import Refusal

Side = Literal["head", "body"]


@checked
class Personal(Method):
    """Clients keep the head or the body of the network and send the rest.

    Args:
        keep: what stays on the client.
        head: modules of the head. None: the last module with a weight in a forward pass; ``head()``
            of GC-Fed's CNN has two, with 95 % of all weights.
    """

    def __init__(self, keep: Side = "head", head: Sequence[str] | None = None) -> None:
        super().__init__(PrivateSide(keep, head), WithheldSide(keep, head))


class Private(KeptTensors):
    """Does not send the tensors that it keeps."""

    result = OWN_MODELS

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        others = [part.title for part in setup.parts if Fact.TEACHES in part.facts]
        if others:
            raise Refusal(
                f"{self.title} does not combine with {others[0]}: no broadcast model is complete."
            )

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        withhold(upload, self.kept)


class PrivateSide(Private):
    keeps = {"personal": KEPT}

    def __init__(self, side: Side, head: Sequence[str] | None) -> None:
        self.side = side
        self.head = head

    def personal_tensors(self, setup: Setup) -> list[str]:
        return tensors_of_side(setup, self.title, self.side, self.head)


def tensors_of_side(setup: Setup, title: str, side: Side, head: Sequence[str] | None) -> list[str]:
    """The names of the head's or the body's tensors, those of the method ``title``.

    Raises Refusal if a module of the head has no tensors, or the body none.
    """
    modules = [setup.forward_order.last_module] if head is None else head
    travels = setup.module.travels
    of_head: list[str] = []
    has_empty = False  # whether a module has no tensors
    for module in modules:
        found = [name for name in travels if f"{name}.".startswith(f"{module}.")]
        has_empty |= not found
        of_head += found
    of_body = [name for name in travels if name not in of_head]
    if has_empty or not (of_head and of_body):
        known = ", ".join(name for name, _ in setup.module.net.named_modules() if name)
        raise Refusal(
            f"{title}: head={[*modules]} must be modules with tensors, and not all, of {known}."
        )
    return of_head if side == "head" else of_body


def withhold(upload: Upload, names: Iterable[str]) -> None:
    """Leaves these entries of Δ out of K uploads."""
    for name in names:
        upload.delta[name] = upload.delta[name].new_empty(len(upload.clients), 0)


class Withheld(ServerPart):
    """Expects no entries of the personal tensors.

    A subclass chooses them by the function that its client part calls, too.
    """

    def validate(self, setup: Setup) -> None:
        if setup.server_optimizer_probe.defaults.get("weight_decay"):
            raise Refusal(
                f"{self.title} needs server.weight_decay=0: the server must not change personal"
                " tensors."
            )

    def bind(self, setup: Setup) -> None:
        params = setup.module.net.state_dict()
        self.kept = {name: params[name].shape for name in self.personal_tensors(setup)}

    def on_broadcast(self, download: Download, round: Round) -> None:
        download.sent_bytes |= dict.fromkeys(self.kept, 0)  # clients know the initial values

    def uploads(self, round: Round) -> dict[str, Params]:
        return {"delta": {name: round.broadcast_model[name].new_empty(0) for name in self.kept}}

    def decode(self, name: str, sent: Tensor) -> Tensor:
        # another part may withhold the same tensor, and has decoded it
        if name not in self.kept or sent.numel():
            return sent
        return sent.new_zeros(*sent.shape[:-1], *self.kept[name])

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        update |= {name: torch.zeros_like(round.broadcast_model[name]) for name in self.kept}


class WithheldSide(Withheld):
    def __init__(self, side: Side, head: Sequence[str] | None) -> None:
        self.side = side
        self.head = head

    def personal_tensors(self, setup: Setup) -> list[str]:
        return tensors_of_side(setup, self.title, self.side, self.head)
