"""Undoes what a trial pass does to a network."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)
OWN = vars(nn.Module()).keys()  # attributes of every module
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """After the block, attributes, buffers and modes of the network are as before. What lists and dicts contain is
    restored, but not what is in their entries.
    """
    memo: dict[int, Any] = {}  # generators that two modules share stay shared
    modules = [m for m in net.modules() if not isinstance(m, torch.jit.ScriptModule)]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (own, {key: deepcopy(v, memo) if isinstance(v, GENERATORS) else v for key, v in own.items()})
        for m in modules
        for own in (m.__dict__, m._buffers)
    ]
    held: list[tuple[Any, Any]] = [
        (v, copy(v)) for _, b in attributes for k, v in b.items() if isinstance(v, CONTAINERS) and k not in OWN
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
