"""Leaves a network and its inputs as they were."""

import pickle
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

PLAIN = (bool, int, float, complex, str, type(None))
CONTAINERS = (list, dict, set, deque)
OWN = vars(nn.Module()).keys()  # attributes of every module
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """After the block, attributes, buffers and modes of the network are as before, and lists and
    dicts too.
    """
    memo: dict[int, Any] = {}  # generators that two modules share stay shared
    modules = [m for m in net.modules() if not isinstance(m, torch.jit.ScriptModule)]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            own,
            {key: deepcopy(v, memo) if isinstance(v, GENERATORS) else v for key, v in own.items()},
        )
        for m in modules
        for own in (m.__dict__, m._buffers)
    ]
    held: list[tuple[Any, Any]] = [
        (v, copy(v))
        for _, b in attributes
        for k, v in b.items()
        if isinstance(v, CONTAINERS)
        and type(v).__module__ in ("builtins", "collections")
        and k not in OWN
    ]
    plain = [t for _, before in attributes for t in before.values() if isinstance(t, Tensor)]
    distinct = {id(t): t for t in (*plain, *net.buffers())}.values()
    tensors = [(t, t._version, t.detach().clone()) for t in distinct]
    training = net.training
    try:
        yield
    finally:
        net.train(training)  # modules in TorchScript
        for own, before in attributes:
            own.clear()
            own.update(before)
        for kept, content in held:
            kept.clear()
            (kept.extend if isinstance(kept, list | deque) else kept.update)(content)
        for t, version, value in tensors:
            if t._version != version:
                t.detach().copy_(value)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Puts the network into evaluation mode in the block."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


def hand_copies(net: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook for networks that change their input: copies the input, so that the batch
    stays the same.
    """
    return tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs)


@contextmanager
def unedited(x: Tensor) -> Iterator[None]:
    """Raises ValueError if the block changes ``x``; networks that did so in the
    probe get copies.
    """
    version = None if x.is_inference() else x._version
    yield
    if version is not None and x._version != version:
        raise ValueError(
            "model: forward changes its input in some steps only: begin it with x = x.clone()."
        )


def attributes(net: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Numbers, tensors, generators and containers in attributes of modules: name → value, and a
    mark of its state.
    """
    kinds = (*PLAIN, *CONTAINERS, Tensor, *GENERATORS)
    return {
        f"{name}.{key}".lstrip("."): (value, mark(value))
        for name, module in net.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for key, value in vars(module).items()
        if isinstance(value, kinds) and key not in OWN
    }


def mark(value: Any) -> Any:
    # without its tensors, because many networks keep features in a list
    if isinstance(value, CONTAINERS):
        return [pickle.dumps(leaf) for leaf in tree_leaves(value) if isinstance(leaf, PLAIN)]
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return (id(value), value._version) if isinstance(value, Tensor) else pickle.dumps(value)
