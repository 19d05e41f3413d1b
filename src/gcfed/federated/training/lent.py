"""Lends the user's own network to one client after another, without copying it.

While a client trains, ``parameter.data`` is the client's tensor. Afterwards it is the network's own
again. The parameter objects stay the same, so lists of weights, closures, hooks, TorchScript and
``torch.utils.checkpoint`` work.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gcfed.federated.training.forward import Params, slots


@dataclass(frozen=True)
class Traits:
    """What the engine must know about a network.

    A text says why something fails; it is empty if it works.
    """

    # frozen parameters and integer buffers that training changes; they travel
    moved: tuple[str, ...] = ()
    edits_input: bool = False  # forward changes its input; it then gets copies
    contiguous: bool = False  # training fails in channels_last
    functional: str = ""  # why a call cannot use other tensors than the network's own
    alone: str = ""  # why several clients cannot train in one stack
    single: str = ""  # why a batch of a single sample fails
    assigns: bool = False  # forward replaces tensors by new ones, which no CUDA graph can record


class Lent:
    """A network that is lent to clients."""

    def __init__(self, net: nn.Module, traits: Traits | None = None) -> None:
        self.net, self.traits = net, traits or Traits()
        # version, address, and a buffer's value
        self._others: dict[str, tuple[int, int, Tensor | None]] = {}
        self._loan = ExitStack()  # ends when the network gets its own tensors back
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        self.end()

    def begin(self, rows: Mapping[str, Tensor]) -> None:
        """Gives the network a client's tensors, ``[*shape]``; the clients share all others, which
        must not change.
        """
        self.end()
        self._rows: Params = dict(rows)  # the client's tensors
        self._loan.enter_context(self.holding(rows))
        self._others = {
            n: (
                t._version,
                t.data_ptr(),
                None if isinstance(t, nn.Parameter) else t.detach().clone(),
            )
            for n, t in self.tensors.items()
            if n not in rows
        }

    def end(self) -> None:
        """Gives the network its own tensors back.

        A move to another device, or a test, may have made new buffers.
        """
        self._loan.close()
        self._rows = {}
        if not self._slots or any(
            tensors[key] is not self.tensors[name] for tensors, key, name in self._slots
        ):
            # Its parameters and buffers, by name; always the same objects, also while a client has
            # the network.
            self.tensors: Params = {
                **dict(self.net.named_parameters()),
                **dict(self.net.named_buffers()),
            }
            self.saved = self.net.state_dict().keys()  # the names of those that checkpoints have
            self._slots = slots(self.net)

    def present(self) -> Params:
        """The client's present tensors, by name, also where a forward pass has put new ones."""
        return {name: tensors[key].detach() for tensors, key, name in self._slots}

    def replaced(self) -> set[str]:
        """Names of tensors that forward has replaced, except parameters that it has tied to others
        of the network.
        """
        ids = {id(t) for t in self.tensors.values()}
        return {
            name
            for tensors, key, name in self._slots
            if (row := self._rows.get(name)) is not None
            and (now := tensors[key]).data_ptr() != row.data_ptr()
            and (now is (own := self.tensors[name]) or id(now) not in ids or not own.requires_grad)
        }

    def settle(self) -> None:
        """After local training, copies tensors that forward passes have replaced into the client's.

        Raises:
            ValueError: a forward pass gave a trained parameter new memory, or changed a shared
                tensor.
        """
        replaced = self.replaced()
        # Copies, because two buffers may have changed places.
        values = {
            name: tensors[key].detach().clone()
            for tensors, key, name in self._slots
            if name in replaced
        }
        for tensors, key, name in self._slots:
            own = self.tensors[name]
            if name in replaced:
                if own.requires_grad:
                    raise new_memory(name)
                self._rows[name].copy_(values[name])
                own.data = self._rows[name]
            tensors[key] = own
        for name, (version, memory, value) in self._others.items():
            written = ((own := self.tensors[name])._version, own.data_ptr()) != (version, memory)
            # a mask may be written anew
            if written and (value is None or not torch.equal(own, value)):
                text = (
                    f"model: forward changes {name} in some steps only: do it in all training steps"
                    " or in __init__."
                )
                raise ValueError(text)

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Gives the network these tensors, ``[*shape]``, in the block."""
        before = {name: self.tensors[name].data for name in tensors}
        try:
            for name, t in tensors.items():
                self.tensors[name].data = t.detach().to(before[name].dtype)
            yield
        except GeneratorExit:  # of a forgotten loan, whenever the garbage collector comes
            before = {}
            raise
        finally:
            for name, data in before.items():
                self.tensors[name].data = data
            for own, key, name in self._slots if before else ():
                own[key] = self.tensors[name]


def new_memory(name: str) -> ValueError:
    return ValueError(
        f"model: forward gives the trained parameter {name} new memory (`.data = …`, or a new"
        " Parameter), which its optimizer does not know. Change it in place:"
        f" self.{name}.data.copy_(…)."
    )


def travelling(net: nn.Module) -> tuple[str, ...]:
    """Names of the tensors that server and clients exchange: trained parameters and finite
    floating-point buffers.

    Frozen parameters, integers and masks of −∞ are constants. If a forward pass changes one, the
    probe finds it (:mod:`gcfed.federated.training.probe`). A buffer with ``persistent=False``
    starts again each round.
    """
    saved = net.state_dict()
    params = [name for name, p in net.named_parameters() if p.requires_grad]
    floats = [name for name, b in net.named_buffers() if name in saved and b.is_floating_point()]
    return (*params, *(name for name in floats if saved[name].isfinite().all()))


def broadcast_state(net: nn.Module, names: Sequence[str] | None = None) -> Params:
    """Copies of these tensors, by default of all that travel, name → ``[*shape]``; integers as
    float32.
    """
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    chosen = {name: tensors[name].detach() for name in names or travelling(net)}
    return {name: t.clone() if t.is_floating_point() else t.float() for name, t in chosen.items()}
