"""The user's own network, lent to one client after another: nothing of it is copied or replaced.

``parameter.data`` points to a client's tensors while the client trains, and home again afterwards. All objects keep
their identity, so lists of weights, closures, hooks, TorchScript and ``torch.utils.checkpoint`` reach the client's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gcfed.federated.training.forward import Params


@dataclass(frozen=True)
class Traits:
    """What the engine must know of a network beyond its layers.

    Attributes:
        moved: frozen parameters and integer buffers that training changes; they travel.
        edits_input: whether forward changes its input; it gets copies.
        contiguous: whether training fails in ``channels_last``.
        functional: why ``torch.func.functional_call`` cannot stand for a call of the network; empty where it can.
        alone: why several clients cannot train in one stack; empty where they can.
        assigns: whether forward replaces tensors by new ones, which no CUDA graph may record.
    """

    moved: tuple[str, ...] = ()
    edits_input: bool = False
    contiguous: bool = False
    functional: str = ""
    alone: str = ""
    assigns: bool = False


class Lent:
    """A network that is lent to clients.

    Attributes:
        tensors: its parameters and buffers, by name; always the same objects.
    """

    def __init__(self, net: nn.Module, traits: Traits | None = None) -> None:
        self.net, self.traits = net, traits or Traits()
        self._rows: Params = {}
        self._home: Params = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._look()

    def _look(self) -> None:
        self.tensors: Params = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        self._ids = names = {id(t): name for name, t in self.tensors.items()}
        self._slots: list[tuple[dict[str, Any], str, str]] = [
            (own, key, names[id(t)])
            for module in self.net.modules()
            for own in (module._parameters, module._buffers)
            for key, t in own.items()
            if t is not None
        ]

    def begin(self, rows: Mapping[str, Tensor]) -> None:
        """A client begins with these tensors, ``[*shape]``; all others are constants that clients share."""
        self.home()
        if any(tensors[key] is not self.tensors[name] for tensors, key, name in self._slots):
            self._look()  # a move to another device makes new buffers, and so may a forward pass of a test
        self._rows = dict(rows)
        for name, row in rows.items():
            own = self.tensors[name]
            self._home[name] = own.data
            own.data = row
        self._versions = {n: (t._version, t.data_ptr()) for n, t in self.tensors.items() if n not in rows}

    def own(self, name: str) -> Tensor:
        """The network's own tensor of this name, also while a client has it."""
        return self._home.get(name, self.tensors[name].data)

    def present(self) -> Params:
        """The client's tensors as they are now, where a forward pass may have put new ones."""
        return {name: tensors[key].detach() for tensors, key, name in self._slots}

    def replaced(self) -> set[str]:
        """Names of the client's tensors that a forward pass has replaced or moved; not those that it ties to others."""
        return {
            name
            for tensors, key, name in self._slots
            if (row := self._rows.get(name)) is not None
            and (now := tensors[key]).data_ptr() != row.data_ptr()
            and (now is self.tensors[name] or id(now) not in self._ids)
        }

    def settle(self) -> None:
        """Local training is over: copies into the client's tensors what forward passes have put in their place.

        Raises:
            ValueError: a forward pass has given a trained parameter new memory, or changed a shared constant.
        """
        replaced = self.replaced()
        for tensors, key, name in self._slots:
            own, row = self.tensors[name], self._rows.get(name)
            if name in replaced and own.requires_grad:
                raise new_memory(name)
            if name in replaced and row is not None:
                row.copy_(tensors[key].detach())
                own.data = row
            tensors[key] = own
        for name, (version, memory) in self._versions.items():
            if (own := self.tensors[name])._version != version or own.data_ptr() != memory:
                raise ValueError(
                    f"model: forward changes {name} in some steps only, so the check before the first round took it "
                    "for a constant. Change it in every training step, in __init__ or in a callback."
                )

    def home(self) -> None:
        """The network has its own tensors again."""
        for name, data in self._home.items():
            self.tensors[name].data = data
        for tensors, key, name in self._slots if self._home else ():
            tensors[key] = self.tensors[name]
        self._home, self._rows, self._versions = {}, {}, {}

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Gives the network these tensors, ``[*shape]``, for passes without gradients; it keeps its others."""
        before = {name: self.tensors[name].data for name in tensors}
        try:
            for name, t in tensors.items():
                own = self.tensors[name]
                own.data = t.detach().to(own.dtype)
            yield
        finally:
            for name, data in before.items():
                self.tensors[name].data = data


def new_memory(name: str) -> ValueError:
    return ValueError(
        f"model: forward gives the trained parameter {name} new memory (`.data = …`, or a new Parameter), which its "
        f"optimizer does not know. Change it in place: self.{name}.data.copy_(…)."
    )
