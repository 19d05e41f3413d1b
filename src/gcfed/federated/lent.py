"""The user's own network, lent to one client after another: nothing of it is copied or replaced.

``parameter.data`` points to a client's tensors while the client trains, and home again afterwards. All objects keep
their identity, so lists of weights, closures, hooks, TorchScript and ``torch.utils.checkpoint`` reach the client's.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gcfed.federated.forward import Params, Tap


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
        self._teacher_checked = False
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
        self.__dict__.pop("teacher", None)

    def begin(self, rows: Mapping[str, Tensor]) -> None:
        """A client begins: these are its tensors, ``[*shape]``; all others are constants that clients share."""
        self.home()
        if any(tensors[key] is not self.tensors[name] for tensors, key, name in self._slots):
            self._look()  # a move to another device makes new buffers, and so may a forward pass of a test
        self._rows = dict(rows)
        for name, row in rows.items():
            own = self.tensors[name]
            self._home[name] = own.data
            own.data = row
        self._versions = {n: (t._version, t.data_ptr()) for n, t in self.tensors.items() if n not in rows}

    def present(self) -> Params:
        """The client's tensors as they are now, where a forward pass may have put new ones."""
        return {name: tensors[key].detach() for tensors, key, name in self._slots}

    def replaced(self) -> set[str]:
        """Names of the client's tensors that a forward pass has put new ones in the place of, or given new memory.

        A parameter that it ties to another is not among them.
        """
        return {
            name
            for tensors, key, name in self._slots
            if (row := self._rows.get(name)) is not None
            and (now := tensors[key]).data_ptr() != row.data_ptr()
            and (now is self.tensors[name] or id(now) not in self._ids)
        }

    def settle(self) -> None:
        """Local training is over: what forward passes put in place of the client's tensors is copied into them.

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
        """The network with these tensors, ``[*shape]``, for passes without gradients; those without a name stay."""
        before = {name: self.tensors[name].data for name in tensors}
        try:
            for name, t in tensors.items():
                own = self.tensors[name]
                own.data = t.detach().to(own.dtype)
            yield
        finally:
            for name, data in before.items():
                self.tensors[name].data = data

    @cached_property
    def teacher(self) -> "Lent":
        """A copy in evaluation mode, without gradients, for fixed networks; frozen parameters are shared."""
        # What a module keeps beside its parameters may have been computed from them, as weight_norm's weight is.
        kept = [t for m in self.net.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
        memo: dict[int, Any] = {id(t): t.detach().clone() for t in kept}
        frozen = (n for n, p in self.net.named_parameters() if not p.requires_grad and n not in self.traits.moved)
        memo |= {id(self.tensors[name]): self.tensors[name] for name in frozen}
        try:
            net = copy.deepcopy(self.net, memo)
        except Exception as error:
            raise ValueError(
                f"model: this method needs a copy of {type(self.net).__name__} as its teacher, and copy.deepcopy of it "
                f"fails: {error}"
            ) from error
        net.zero_grad()
        return Lent(net.requires_grad_(False).eval())

    def check_teacher(self, tap: Tap, x: Tensor, first: int) -> None:
        """Once a run: raises ValueError where the copy still reads the original's weights, as a closure does."""
        if self._teacher_checked:
            return
        self._teacher_checked = True
        trained = {n: torch.full_like(t, torch.nan) for n, t in self.tensors.items() if t.requires_grad}
        with torch.no_grad():
            before = tap(x, first)
            with self.holding(trained):
                after = tap(x, first)
        if all(bool(t.isfinite().all()) for t in before) and any(bool(t.isnan().any()) for t in after):
            raise ValueError(
                f"model: this method needs a copy of {type(self.net).__name__} as its teacher, and the copy still "
                "reads weights of the original: by a closure, a lambda over self, or TorchScript. Reach them "
                "through self in forward, or choose a method without a teacher."
            )


def new_memory(name: str) -> ValueError:
    return ValueError(
        f"model: forward gives the trained parameter {name} new memory (`.data = …`, or a new Parameter), which its "
        f"optimizer does not know. Change it in place: self.{name}.data.copy_(…)."
    )
