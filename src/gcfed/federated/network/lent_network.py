"""Lends the user's own network to one client after another, without copying it.

While a client trains, ``parameter.data`` is the client's tensor. Afterwards it is the network's own
tensor again. The parameter objects stay the same, so lists of weights, closures, hooks, TorchScript
and ``torch.utils.checkpoint`` work.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from gcfed.federated.network.tap import Slot, dense_buffers, slots
from gcfed.federated.protocol.messages import Params
from gcfed.models.snapshot import Snapshot
from gcfed.tasks import Task
from gcfed.utils.refusal import Refusal


@dataclass(frozen=True)
class Traits:
    """What the engine must know about a network.

    A text says why something fails; it is empty if it works.
    """

    # frozen parameters and integer buffers that training changes; they travel and are averaged
    averaged: tuple[str, ...] = ()
    edits_input: bool = False  # forward changes its input; it then gets copies
    contiguous: bool = False  # training fails in channels_last
    why_not_functional: str = ""  # why a call cannot use other tensors than the network's own
    why_alone: str = ""  # why several clients cannot train in one stack
    why_single_fails: str = ""  # why a batch of a single sample fails
    mixes_samples: bool = False  # results of a sample depend on the others of its batch
    assigns: bool = False  # forward replaces tensors by new ones, which no CUDA graph can record
    # attributes keep something from one call to the next: each client begins with the first values
    has_hidden_state: bool = False


class LentNetwork:
    """A network that is lent to clients.

    Args:
        task: the user's task, which may keep something from one call to the next, too.
    """

    def __init__(
        self, net: nn.Module, traits: Traits | None = None, task: Task | None = None
    ) -> None:
        self.net = net
        self.task = task
        self.traits = traits or Traits()
        self._client_tensors: Params = {}
        # the tensors that all clients share, by name
        self._shared_tensors: dict[str, _SharedTensor] = {}
        self._first_attributes: Snapshot | None = None  # the attributes before the first client
        self._loan = ExitStack()  # ends when the network gets its own tensors back
        self._slots: list[Slot] = []
        self.find_tensors()

    def lend(self, rows: Mapping[str, Tensor]) -> None:
        """Gives the network a client's tensors, ``[*shape]``.

        The clients share all other tensors, which must not change.
        """
        self.take_back()
        self._client_tensors = dict(rows)
        self._loan.enter_context(self.holding(rows))
        self._shared_tensors = {}
        for name, t in self.tensors.items():
            if name not in rows:
                self._shared_tensors[name] = _SharedTensor.of(t)

    def take_back(self) -> None:
        """Gives the network its own tensors back."""
        self._loan.close()
        self._client_tensors = {}

    def find_tensors(self) -> None:
        """Finds the network's own tensors, which no client has now. A move to another device, or a
        test, may have made new ones.
        """
        moved = any(slot.tensor is not self.tensors[slot.name] for slot in self._slots)
        if not moved and self._slots:
            return
        # The network's parameters and buffers, by name. They stay the same objects while a client
        # has the network.
        self.tensors: Params = {}
        self.tensors.update(self.net.named_parameters())
        self.tensors.update(dense_buffers(self.net))
        self.saved = self.net.state_dict().keys()  # names of the tensors in checkpoints
        self._slots = slots(self.net)

    def reset_attributes(self, num_clients: int) -> None:
        """Gives the attributes of a network and of a task their first values, if one of them keeps
        something from one call to the next. Those of a single client go on.

        Args:
            num_clients: the number of clients of the run.
        """
        if num_clients < 2 or not self.traits.has_hidden_state:
            return
        if self._first_attributes is None:  # only now they are on the device that trains
            self._first_attributes = Snapshot(self.net, self.task, attributes_only=True)
        self._first_attributes.restore()

    def present(self) -> Params:
        """The client's present tensors, by name. A forward pass may have put new ones in place."""
        return {slot.name: slot.tensor.detach() for slot in self._slots}

    def replaced(self) -> set[str]:
        """Names of tensors that forward has replaced."""
        found = set()
        for slot in self._slots:
            row = self._client_tensors.get(slot.name)
            if row is not None and slot.tensor.data_ptr() != row.data_ptr():
                found.add(slot.name)
        return found

    def settle(self) -> None:
        """Copies the tensors with which forward passes have replaced the client's into the
        client's, after local training.

        Raises:
            Refusal: a forward pass gave a trained parameter new memory, or changed a shared
                tensor.
        """
        replaced = self.replaced()
        # Copies, because two buffers may have changed places.
        values = {}
        for slot in self._slots:
            if slot.name in replaced:
                values[slot.name] = slot.tensor.detach().clone()
        for slot in self._slots:
            network_own = self.tensors[slot.name]
            if slot.name in replaced:
                if network_own.requires_grad:
                    raise new_memory(slot.name)
                row = self._client_tensors[slot.name]
                row.copy_(values[slot.name])
                network_own.data = row
            slot.put(network_own)
        for name, shared in self._shared_tensors.items():
            if shared.differs(self.tensors[name]):
                raise Refusal(
                    f"model: forward changes {name} in some steps only: do it in all training steps"
                    " or in __init__."
                )

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Gives the network these tensors, ``[*shape]``, in the block."""
        before = {name: self.tensors[name].data for name in tensors}
        try:
            for name, t in tensors.items():
                self.tensors[name].data = t.detach().to(before[name].dtype)
            yield
        except GeneratorExit:  # the garbage collector may end a forgotten loan at any time
            before = {}
            raise
        finally:
            for name, data in before.items():
                self.tensors[name].data = data
            if before:
                for slot in self._slots:
                    slot.put(self.tensors[slot.name])


class _SharedTensor(NamedTuple):
    """A tensor that all clients share, as it was when a client got the network."""

    version: int
    address: int
    value: Tensor | None  # a copy of a buffer; None for a parameter

    @classmethod
    def of(cls, t: Tensor) -> Self:
        value = None if isinstance(t, nn.Parameter) else t.detach().clone()
        return cls(t._version, t.data_ptr(), value)

    def differs(self, now: Tensor) -> bool:
        """Whether the tensor has changed since. Forward may write a mask anew with equal values."""
        if now._version == self.version and now.data_ptr() == self.address:
            return False
        if self.value is None:
            return True
        return not torch.equal(now, self.value)


def make_contiguous(net: nn.Module) -> None:
    """Gives parameters and dense buffers memory of their own in the contiguous layout."""
    for t in (*net.parameters(), *dense_buffers(net).values()):
        # .contiguous() would leave the strides of a single channel as they are
        t.data = t.data.clone(memory_format=torch.contiguous_format)


def new_memory(name: str) -> Refusal:
    return Refusal(
        f"model: forward gives the trained parameter {name} other memory (`.data = …`, or another"
        " Parameter), which its optimizer does not know. Change it in place"
        f" (self.{name}.data.copy_(…)), or tie it in __init__."
    )


def travelling(net: nn.Module) -> tuple[str, ...]:
    """Names of the tensors that server and clients exchange: trained parameters and finite
    floating-point buffers.

    Frozen parameters, integers and masks of −∞ are constants. If a forward pass changes one, the
    probe finds it (:mod:`gcfed.federated.network.probing.probe`). A buffer with
    ``persistent=False`` starts again each round.
    """
    saved = net.state_dict()
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    for name, buffer in dense_buffers(net).items():
        if name in saved and buffer.is_floating_point() and saved[name].isfinite().all():
            names.append(name)
    return tuple(names)


def travelling_state(net: nn.Module, names: Sequence[str] | None = None) -> Params:
    """Copies of these tensors, name → ``[*shape]``; by default of all that travel.

    Integers become float32.
    """
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    copies = {}
    for name in names or travelling(net):
        t = tensors[name].detach()
        copies[name] = t.clone() if t.is_floating_point() else t.float()
    return copies
