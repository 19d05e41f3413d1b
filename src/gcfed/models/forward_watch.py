"""Watches a forward pass, to find in which order it uses a network's parameters, and how.

``named_parameters()`` has the order of declaration, which may differ from the order of computation.
So a dispatch mode watches one forward pass: it sees each operation and the parameters in its
inputs. It needs no list of module types, and works with functional calls, parametrizations,
checkpoints and TorchScript.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gcfed.models.dependence import Change, tensors_in
from gcfed.models.facts import first_weight
from gcfed.models.order import ForwardOrder, declared_order
from gcfed.models.unchanged import unchanged
from gcfed.utils.refusal import message_of

log = logging.getLogger(__name__)

#: Operations that add a tensor to others, or join it with them.
ADDS = {
    "add",
    "sub",
    "rsub",
    "cat",
    "stack",
    "copy",
    "where",
    "index_put",
    "masked_scatter",
    "slice_scatter",
}
#: Operations that select rows of a table. With rows that the input's values choose, the table is a
#: layer (token embeddings).
LOOKUPS = {"embedding", "index", "index_select", "gather"}
#: Products of matrices; einsum, matmul and linear consist of them.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}
#: Operations that join tensors, so that their result has more entries than each of them.
JOINS = {"cat", "stack"}


@dataclass
class Read:
    """The parameters from which the inputs of one operation come.

    Attributes:
        sources: parameter → the input that comes from it.
        whole: those that some input does not repeat.
        in_rows: those whose rows are the rows of some input.
        mixed: those whose rows the operation mixes.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    in_rows: set[str] = field(default_factory=set)
    mixed: set[str] = field(default_factory=set)


@dataclass
class Made:
    """The parameters from which memory was computed.

    Attributes:
        repeated: those whose entries it only has repeated.
        without_rows: those whose rows are none of its rows.
    """

    sources: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    without_rows: set[str] = field(default_factory=set)


class ForwardWatch:
    """Watches one forward pass of a network: :meth:`watching`, then :meth:`order`."""

    def __init__(self, net: nn.Module) -> None:
        self.params = dict(net.named_parameters())
        # of the parameters that are found so far: see ``ForwardOrder``
        self._place: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._weights: set[str] = set()
        self._matrices: set[str] = set()
        self._now = 0
        self._latest = 0  # when the last weight met the data
        self._before_latest = 0
        self._in_call = False  # whether a function of torch runs; its operations count as one
        self._entered: dict[int, int] = {}  # module → when it was called
        self._seen: dict[str, int] = {}
        self._data: set[int] = set()  # memory that depends on the input
        # that which depends on it only by comparisons, such as which tokens are padding
        self._masks: set[int] = set()
        # of memory that depends on parameters alone
        self._made: dict[int, Made] = defaultdict(Made)
        # module → the parameters that are, or give, the input of its latest call
        self._given: dict[int, set[str]] = defaultdict(set)
        self._alive: list[Tensor] = []  # keeps memory from being used twice
        names = {id(parameter): name for name, parameter in self.params.items()}
        self._owners: dict[str, list[int]] = defaultdict(list)
        parametrizations: set[nn.Module] = set()  # their input is a weight
        for module in net.modules():
            if isinstance(module, ParametrizationList):
                parametrizations.update(module.modules())
        self._layers: list[nn.Module] = []
        for module in net.modules():
            # torch.jit allows no hooks
            if module not in parametrizations and not isinstance(module, torch.jit.ScriptModule):
                self._layers.append(module)
        for module in net.modules():
            for parameter in module.parameters(recurse=False):
                self._owners[names[id(parameter)]].append(id(module))
        self._spans: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for name, parameter in self.params.items():
            self._spans[_memory(parameter)].append((name, *_span(parameter)))

    @contextmanager
    def watching(self, x: Tensor) -> Iterator[None]:
        """Watches the operations in the block, in which the network is called on this input."""
        self._data.add(_memory(x))
        watch = self

        class Calls(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                watch._now += 1
                watch._in_call = True
                out = func(*args, **(kwargs or {}))
                watch._in_call = False
                return out

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return watch.operate(func, args, kwargs or {})

        def enter(module: nn.Module, _: Any) -> None:
            watch._now += 1
            watch._entered[id(module)] = watch._now

        hooks = [register_module_forward_pre_hook(enter)]
        for module in self._layers:
            hooks.append(module.register_forward_pre_hook(self._note_inputs, with_kwargs=True))
        try:
            with Calls(), Operations():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._alive.clear()

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes from which parameters the inputs of a module's call come."""
        given = set()
        for t in tensors_in((args, kwargs)):
            if _memory(t) not in self._data:
                given |= self._sources(t)
        self._given[id(module)] = given

    def order(self) -> ForwardOrder:
        """What the pass has shown."""
        # a parameter that never met the input has its last operation's place
        place = self._seen | self._place
        unused = [name for name in self.params if name not in place]
        unknown = {name for name in unused if self.params[name].dim() > 1}
        last = 0
        # an unused parameter has the place of the one that is declared before it
        for name in self.params:
            last = place.setdefault(name, last)
        return ForwardOrder(
            params=self.params,
            place=place,
            unused=unused,
            used_as_weights=self._weights | unknown,
            matrices=self._matrices | unknown,
            groups=self._groups,
        )

    def operate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operation, such as ``aten.addmm``, and notes the parameters that it uses."""
        out = func(*args, **kwargs)
        if not self._in_call:
            self._now += 1
        inputs = tensors_in((args, kwargs))
        results = tensors_in(out)
        self._alive += inputs + results
        written = list(results)
        if func._schema.is_mutable:
            written += inputs[:1]
        meets_data = any(_memory(t) in self._data for t in inputs)
        sees_values = any(self._is_of_values(t) for t in inputs)
        read = Read()
        for t in inputs:
            if _memory(t) not in self._data:
                self._read_input(Change(func, args, kwargs, t, results), meets_data, read)
        read.in_rows -= read.mixed
        weights: dict[str, Tensor] = {}
        if len(inputs) > 1 and _may_be_layer(func, meets_data, sees_values):
            weights = self._weights_in(func, args, read)
        if not meets_data:
            for name in self._inputs_of_layers(weights):
                read.in_rows.discard(name)
                weights.pop(name, None)
        self._note_weights(func, args, weights, meets_data)
        if meets_data:
            self._note_data(written, sees_values)
            sums = torch.Tag.pointwise not in func.tags
            for name in sorted(read.sources, key=lambda name: name not in weights):
                self._use(name, sums and name in weights)
        elif read.sources:
            self._note_made(written, read)
        return out

    def _weights_in(self, func: Any, args: Sequence[Any], read: Read) -> dict[str, Tensor]:
        """The parameters that an operation uses as a layer's weights, and the inputs that come from
        them.
        """
        weights = {}
        for name, t in read.sources.items():
            if name not in read.in_rows or not self._multiplies(func, args, name, t):
                continue
            scales_all_outputs = len(self.params[name]) == 1 and name not in read.whole
            if not scales_all_outputs:
                weights[name] = t
        return weights

    def _note_made(self, written: Iterable[Tensor], read: Read) -> None:
        """Notes that these tensors are computed from parameters alone."""
        self._seen |= dict.fromkeys(read.sources, self._now)
        for t in written:
            made = self._made[_memory(t)]
            made.sources |= read.sources.keys()
            made.repeated |= read.sources.keys() - read.whole
            made.without_rows |= read.sources.keys() - read.in_rows

    def _is_of_values(self, t: Tensor) -> bool:
        """Whether a tensor depends on the input, and not only by comparisons."""
        return _memory(t) in self._data and _memory(t) not in self._masks

    def _note_data(self, written: Iterable[Tensor], sees_values: bool) -> None:
        """Notes that these tensors depend on the input, or only on comparisons of it."""
        for t in written:
            self._data.add(_memory(t))
            if t.dtype == torch.bool or not sees_values:
                self._masks.add(_memory(t))
            else:
                self._masks.discard(_memory(t))

    def _read_input(self, change: Change, meets_data: bool, read: Read) -> None:
        """Notes how one input of an operation comes from parameters."""
        t = change.t
        names = self._sources(t)
        if not names:
            return
        made = self._made[_memory(t)]
        with_rows = names - made.without_rows
        if meets_data or not _repeats(change):
            read.whole |= names - made.repeated
        elif t.numel() == max(t.shape, default=1):  # sums, or a diagonal, that scale a matrix
            with_rows = {name for name in with_rows if self.params[name].numel() <= t.numel()}
        if not meets_data and _mixes(change):
            read.mixed |= with_rows
        # an input that has the parameter's rows is shown before one that has them not
        shown = with_rows | (names - read.in_rows)
        read.sources |= dict.fromkeys(shown, t)
        read.in_rows |= with_rows

    def _inputs_of_layers(self, weights: Iterable[str]) -> set[str]:
        """The parameters that are inputs of the modules to which these weights belong."""
        inputs: set[str] = set()
        for name in weights:
            for owner in self._owners[name]:
                inputs |= self._given[owner] - {name}
        return inputs

    def _note_weights(
        self, func: Any, args: Sequence[Any], weights: Mapping[str, Tensor], meets_data: bool
    ) -> None:
        """Notes what an operation shows about the parameters that it uses as weights."""
        self._weights |= weights.keys()
        for name, t in weights.items():
            self._orient(func, args, name, t, meets_data)
            if self._is_matrix(func, args, self.params[name], t):
                self._matrices.add(name)

    def _sources(self, t: Tensor) -> set[str]:
        """The parameters of which this tensor is a view, or from which it was computed."""
        start, end = _span(t)
        sources = set(self._made[_memory(t)].sources)
        for name, first, last in self._spans.get(_memory(t), ()):
            if first < end and start < last:
                sources.add(name)
        return sources

    def _multiplies(self, func: Any, args: Sequence[Any], name: str, t: Tensor) -> bool:
        """Whether an operation uses this tensor, computed from the parameter, as a layer's
        weight.
        """
        kind = _kind(func)
        shape = self.params[name].shape
        # scales of a LayerNorm over several axes
        if len(shape) < 2 or kind in ADDS or kind.endswith("_norm"):
            return False
        if shape[0] > 1:
            return True
        if kind.endswith(("convolution", "_trilinear")):
            return t is args[1]
        return len(shape) == 2 and torch.Tag.pointwise not in func.tags

    def _is_matrix(self, func: Any, args: Sequence[Any], parameter: Tensor, t: Tensor) -> bool:
        """Whether an operation uses ``t``, computed from the parameter, as a layer's matrix of
        outputs and inputs.
        """
        if t.is_complex() or torch.Tag.pointwise in func.tags:
            return False
        kind = _kind(func)
        if kind.endswith("convolution"):
            return t is args[1]
        if kind in PRODUCTS and parameter.dim() > 2:  # a convolution as a product with patches
            return sorted(t.shape[-2:]) == sorted((len(parameter), parameter[0].numel()))
        return True  # layers in one operation, such as an LSTM or attention

    def _orient(
        self, func: Any, args: Sequence[Any], name: str, t: Tensor, meets_data: bool
    ) -> None:
        """Notes on which axis a weight has its outputs, at its last use."""
        kind = _kind(func)
        parameter = self.params[name]
        if kind.endswith("convolution") and t is args[1] and t.shape == parameter.shape:
            is_transposed = args[6]
            groups = args[8]
        elif kind in ("mm", "addmm", "bmm", "baddbmm"):
            if not meets_data or sorted(t.shape[-2:]) != sorted(parameter.shape):
                return
            outputs = -1 if t is args[-1] else -2  # of x @ w, or of w @ x
            if parameter.shape[0] != parameter.shape[1]:
                is_transposed = t.shape[outputs] == parameter.shape[1]
            else:
                is_transposed = t.stride()[outputs] == parameter.stride()[1]
            groups = 1
        else:
            return
        self._groups.pop(name, None)
        if is_transposed:
            self._groups[name] = groups

    def _use(self, name: str, is_layer: bool) -> None:
        """Notes that a parameter meets the data, as the weight of a layer or otherwise."""
        called = [owner for owner in self._owners[name] if owner in self._entered]
        owner = max(called, key=self._entered.__getitem__, default=self._owners[name][0])
        if is_layer:
            if self._latest < self._now:
                self._before_latest = self._latest
                self._latest = self._now
            if self._before_latest > self._entered.get(owner, -1):
                self._entered[owner] = self._now
        self._place[name] = self._entered.setdefault(owner, self._now)


def forward_order(net: nn.Module, x: Tensor) -> ForwardOrder:
    """Watches one forward pass in evaluation mode, on inputs ``[B, *input]``, and leaves the
    network as it was.
    """
    watch = ForwardWatch(net)
    x = x.clone()
    with unchanged(net), torch.no_grad():
        net.eval()
        net(x.clone())  # some networks initialise their weights from the first batch
        with watch.watching(x):
            net(x)
    return watch.order()


def order_for_gc(net: nn.Module, x_2: Tensor) -> ForwardOrder:
    """The order in which a forward pass on two samples, ``[2, *input]``, uses the parameters.

    Logs what may surprise users.
    """
    like = first_weight(net)
    x = x_2.to(like.device, like.dtype if x_2.is_floating_point() else None)
    try:
        order = forward_order(net, x)
    except Exception as error:  # the network's own, or a mode that it does not support
        order = declared_order(net)
        reason = message_of(error)
        log.warning(
            "gc takes the order of declaration: it could not watch the network's forward pass (%s)",
            reason,
        )
    for fact in order.facts():
        log.info("gc: %s", fact)
    return order


def _kind(func: Any) -> str:
    """The name of an operation: ``addmm`` of ``aten::addmm_.out``."""
    return func.name().partition("::")[2].partition(".")[0].rstrip("_")


def _may_be_layer(func: Any, meets_data: bool, sees_values: bool) -> bool:
    """Whether an operation with several inputs may be that of a layer.

    Args:
        meets_data: some input depends on the network's input.
        sees_values: and not only by comparisons, as positions that depend on the padding do.
    """
    if _kind(func) in LOOKUPS:
        return sees_values
    return meets_data or torch.Tag.pointwise not in func.tags


def _repeats(change: Change) -> bool:
    """Whether an operation repeats the entries of an input.

    A product sums over them, and a join adds those of its other inputs.
    """
    return _kind(change.func) not in PRODUCTS | JOINS and change.repeats()


def _mixes(change: Change) -> bool:
    """Whether an operation mixes the rows and the columns of an input."""
    return torch.Tag.pointwise not in change.func.tags and change.mixes()


def _memory(t: Tensor) -> int:
    storage = t.untyped_storage()
    return storage.data_ptr() or storage._cdata  # on the meta device, or empty, it has no address


def _span(t: Tensor) -> tuple[int, int]:
    """The positions in a tensor's storage of its first entry, and behind its last entry."""
    start = int(t.storage_offset())
    last = start
    for size, stride in zip(t.shape, t.stride(), strict=True):
        last += (int(size) - 1) * int(stride)
    return start, last + 1
