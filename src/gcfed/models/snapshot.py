"""The state of a network and of all that it refers to, so that a trial pass leaves no mark."""

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

PLAIN = (bool, int, float, complex, str, type(None))
CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, Generator, np.random.RandomState, random.Random)
#: Objects, functions and classes of these packages keep no state of the user's network.
LIBRARIES = sys.stdlib_module_names | {
    "gcfed",
    "hydra",
    "lightning",
    "numpy",
    "omegaconf",
    "peft",
    "timm",
    "torch",
    "torchvision",
    "transformers",
}
OWN = vars(nn.Module()).keys()  # attributes of every module: its mode, hooks, children and tensors
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter


class Snapshot:
    """All that a forward pass or a loss can reach and change: what the network or the task refers
    to, directly or through other objects.

    This covers parameters, buffers, attributes, hooks, modes, containers in containers, the user's
    own objects and classes, NumPy arrays, generators, and variables of closures. Tensors keep their
    memory. Not covered: globals, and Python objects inside of TorchScript. Lazy modules, which the
    first pass completes, are left as they are.

    Args:
        roots: the network, the task.
        attributes_only: without parameters, buffers, modes, and the lists of hooks and children.
    """

    def __init__(self, *roots: object, attributes_only: bool = False) -> None:
        self._undo: list[Callable[[], object]] = []  # brings one object back
        self._seen: dict[int, Any] = {}  # keeps all objects alive, so that no id is used twice
        self._attributes_only = attributes_only
        tensors: list[Tensor] = []
        for root in roots:
            if isinstance(root, nn.Module):  # those of TorchScript are no attributes
                tensors += [*root.parameters(), *root.buffers()]
        if attributes_only:
            self._seen = {id(t): t for t in tensors}
        todo: list[Any] = [*roots, *tensors]
        while todo:
            thing = todo.pop()
            if not isinstance(thing, PLAIN) and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                todo.extend(self._record(thing))

    @property
    def ids(self) -> set[int]:
        """The ids of all objects that the network refers to."""
        return set(self._seen)

    def restore(self) -> None:
        """Brings all of this back."""
        for undo in self._undo:
            undo()

    def _record(self, thing: Any) -> Iterable[Any]:
        """Notes the state of an object. Returns the objects that it refers to."""
        if isinstance(thing, Tensor):
            return self._record_tensor(thing)
        if isinstance(thing, ndarray):
            self._undo.append(partial(_restore_array, thing, thing.copy()))
            return ()
        if isinstance(thing, GENERATORS):
            self._undo.append(_undo_of(thing))
            return ()
        if isinstance(thing, CONTAINERS) and type(thing).__module__ in ("builtins", "collections"):
            return self._record_container(thing)
        if isinstance(thing, tuple):
            return thing
        if isinstance(thing, nn.Module):
            return self._record_module(thing)
        if isinstance(thing, type):
            return self._record_class(thing)
        return self._record_callable_or_object(thing)

    def _record_tensor(self, t: Tensor) -> Iterable[Any]:
        if is_lazy(t):
            return ()
        self._undo.append(_undo_of_tensor(t))
        hooks = [getattr(t, kind) for kind in HOOKS] if t.is_leaf else []
        return [vars(t), *hooks]

    def _record_container(self, container: Any) -> Iterable[Any]:
        if isinstance(container, dict):
            self._undo.append(partial(_restore_dict, container, dict(container)))
            return container.values()
        items = list(container)
        self._undo.append(partial(_restore_items, container, items))
        return items

    def _record_module(self, module: nn.Module) -> Iterable[Any]:
        is_lazy_module = isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()
        is_script = isinstance(module, torch.jit.ScriptModule)
        if (is_lazy_module or is_script) and not self._attributes_only:
            # its other attributes cannot be replaced
            self._undo.append(partial(setattr, module, "training", module.training))
        if is_lazy_module:
            return ()
        if is_script:
            return vars(module).values()
        if not self._attributes_only:
            return self._record_attributes(module)
        self._record_attributes(module, kept=OWN)
        values = [type(module)]
        for key, value in vars(module).items():
            if key in OWN and isinstance(value, dict):
                values.extend(value.values())  # the engine may change the dictionary
            else:
                values.append(value)
        return values

    def _record_attributes(self, thing: Any, kept: Collection[str] = ()) -> Iterable[Any]:
        attributes = vars(thing)
        self._undo.append(partial(_restore_dict, attributes, dict(attributes), kept))
        return [type(thing), *attributes.values()]

    def _record_class(self, cls: type) -> Iterable[Any]:
        if _is_of_a_library(cls.__module__):
            return ()
        attributes = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
        self._undo.append(partial(_restore_class, cls, attributes))
        functions = [value for value in vars(cls).values() if isinstance(value, FunctionType)]
        return [*cls.__bases__, *attributes.values(), *functions]

    def _record_callable_or_object(self, thing: Any) -> Iterable[Any]:
        if isinstance(thing, partial):
            return thing.func, thing.args, thing.keywords
        if isinstance(thing, MethodType):
            return thing.__self__, thing.__func__
        if isinstance(thing, FunctionType):
            if _is_of_a_library(thing.__module__):
                return ()
            return thing.__defaults__, thing.__kwdefaults__, *(thing.__closure__ or ())
        if isinstance(thing, CellType):
            return self._record_cell(thing)
        is_users = not _is_of_a_library(type(thing).__module__) or isinstance(
            thing, SimpleNamespace
        )
        if is_users and hasattr(thing, "__dict__"):
            return self._record_attributes(thing)
        return ()

    def _record_cell(self, cell: CellType) -> Iterable[Any]:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return ()
        self._undo.append(partial(setattr, cell, "cell_contents", content))
        return [content]


def _restore_dict(
    owner: dict[Any, Any], items: dict[Any, Any], names: Collection[str] = ()
) -> None:
    """A dictionary, or the attributes of an object. Attributes of these names stay as they are."""
    kept = {name: owner[name] for name in names if name in owner}
    owner.clear()
    owner.update(items | kept)


def _restore_items(owner: Any, items: list[Any]) -> None:
    """A list, a set or a deque."""
    owner.clear()
    add = owner.update if isinstance(owner, set) else owner.extend
    add(items)


def _restore_class(owner: type, attributes: Mapping[str, Any]) -> None:
    """The attributes of a user's class, without its special methods."""
    now = dict(vars(owner))
    for name in now.keys() - attributes.keys():
        if not name.startswith("__"):
            delattr(owner, name)
    for name, value in attributes.items():
        if now.get(name) is not value:
            setattr(owner, name, value)


def _restore_array(owner: ndarray, entries: ndarray) -> None:
    if owner.flags.writeable:
        owner[...] = entries


def _undo_of_tensor(t: Tensor) -> Callable[[], object]:
    names = ("requires_grad", "grad", *HOOKS) if t.is_leaf else ()
    memory = t.detach()  # of the tensor, without its gradient
    fields = {name: getattr(t, name) for name in names}
    return partial(_restore_tensor, t, memory, memory.clone(), fields)


def _restore_tensor(
    owner: Tensor, memory: Tensor, entries: Tensor, fields: Mapping[str, Any]
) -> None:
    """A tensor: its memory and entries, and those of its fields that a pass may set."""
    if owner.layout != torch.strided:
        owner.data = entries.clone()
    elif not _have_same_memory(owner, memory):
        owner.data = memory
    if not have_same_bits(memory, entries):  # a change of .data counts no version
        memory.copy_(entries)
    for name, value in fields.items():
        if getattr(owner, name) is not value:
            setattr(owner, name, value)


def _undo_of(generator: Any) -> Callable[[], object]:
    if isinstance(generator, Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", deepcopy(bits.state))
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _is_of_a_library(module: str | None) -> bool:
    return (module or "builtins").split(".")[0] in LIBRARIES


def _have_same_memory(one: Tensor, other: Tensor) -> bool:
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other)]
    return places[0] == places[1]


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal bits. NaN equals NaN, and −0 does not equal 0.

    True for tensors without a dense memory, which cannot be compared.
    """
    if one.layout != torch.strided or one.is_meta:
        return True
    return torch.equal(_bits(one), _bits(other))


def _bits(t: Tensor) -> Tensor:
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])
