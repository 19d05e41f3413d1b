"""Counts where a round would wait for a GPU, on a CPU.

All tensors of a round say that they are on a GPU, so the engine takes the code for one.
"""

import sys
from collections import Counter
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.tape import WAITS
from gcfed.federated.engine import bound_run, simulation
from gcfed.federated.engine.layout import Layout
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.state import store
from gcfed.participation.sampling import UniformSampler

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
#: Methods that bring a tensor's numbers to the host.
BRINGS = ("cpu", "numpy", "tolist", "__array__")


class Growing(UniformSampler):
    """Draws half of its clients in the first rounds, and all in the third."""

    def __call__(self, round_index, num_clients, seed):
        drawn = super().__call__(round_index, num_clients, seed)
        return drawn if round_index == 2 else drawn[: len(drawn) // 2]


class Places(Counter):
    """The number of waits by the line of the project that causes them."""

    def note(self, what):
        frame = sys._getframe()
        while frame is not None and "/src/gcfed/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            file = frame.f_code.co_filename.rpartition("/src/gcfed/")[2]
            self[f"{file}:{frame.f_lineno} {what}"] += 1


class Numbers(TorchDispatchMode):
    """Notes operations that bring a number to the host, also inside of torch's own functions."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        tensors = _tensors(args)
        by_mask = name.startswith("index") and any(t.dtype == torch.bool for t in tensors[1:])
        if (name in WAITS or by_mask) and not all(map(_is_on_host, tensors)):
            self.places.note(name)
        return func(*args, **(kwargs or {}))


class OnGPU(TorchFunctionMode):
    """Tensors say that they are on a GPU, except for those that the host makes or gets.

    Notes copies between host and device for which the host waits.
    """

    def __init__(self, places):
        super().__init__()
        self.places = places

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if name == "__get__":
            return self._attribute(func, args)
        if name == "pin_memory":
            return args[0]
        kwargs = dict(kwargs or {})
        tensors = _tensors((args, kwargs))
        from_host = all(map(_is_on_host, tensors))  # also if it makes the first tensor
        target = _named_device(args, kwargs)
        to_host = from_host if target is None else target.type == "cpu"
        if name in BRINGS:
            to_host = True
        self._note(name, args, kwargs, tensors, from_host, to_host)
        args = [CPU if _is_gpu(arg) else arg for arg in args]
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        out = func(*args, **kwargs)

        def marked(t):
            if _is_on_host(t) != to_host and any(t is given for given in tensors):
                if name.endswith("_"):
                    return t
                t = t.detach().view_as(t)  # another object in the same memory
            if to_host:
                t.is_on_host = True
            return t

        return tree_map_only(torch.Tensor, marked, out)

    def _note(self, name, args, kwargs, tensors, from_host, to_host):
        if name in ("tensor", "as_tensor") and not tensors and not to_host:
            self.places.note(f"{name} of numbers of the host")
        if name == "copy_" and _is_on_host(args[0]) != _is_on_host(args[1]):
            self.places.note(name)
        if name in ("__getitem__", "__setitem__") and not _is_on_host(args[0]):
            index = tree_leaves(args[1])
            if any(isinstance(i, np.ndarray) or _is_on_host(i) for i in index):
                self.places.note("index of the host")
        if tensors and from_host != to_host and not kwargs.get("non_blocking"):
            self.places.note(name)

    def _attribute(self, func, args):
        value = func(*args)
        if _is_on_host(args[0]):
            return value
        if isinstance(value, torch.device):
            return GPU
        return True if func.__self__ is torch.Tensor.is_cuda else value


class Generator(torch.Generator):
    """Says that it is on the device that it was made for, and is on a CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")

    def __init__(self, device="cpu"):
        super().__init__()
        self.made_for = torch.device(device)

    device = property(lambda self: self.made_for)


def from_numpy(array):
    """As torch's, which no mode can replace."""
    t = torch.as_tensor(array)
    t.is_on_host = True
    return t


def waits_of_rounds(monkeypatch, run):
    """The waits of each round of the run that the function makes, by place."""
    rounds = []
    run_round = bound_run.run_round

    def noted(*args):
        places = Places()
        rounds.append(places)
        with patch.object(FederatedModule, "device", GPU), Numbers(places), OnGPU(places):
            return run_round(*args)

    with monkeypatch.context() as patched:
        patched.setattr(bound_run, "run_round", noted)
        patched.setattr(simulation, "make_layout", lambda *_: Layout(1, CPU, 0))
        patched.setattr(store, "has_room", lambda device: True)
        patched.setattr(torch, "Generator", Generator)
        patched.setattr(torch, "from_numpy", from_numpy)
        run()
    return rounds


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_on_host(t):
    return getattr(t, "is_on_host", False)


def _is_gpu(value):
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


def _named_device(args, kwargs):
    """The device that a call names; None if it names none."""
    for value in (*args, kwargs.get("device")):
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str) and value.startswith(("cpu", "cuda")):
            return torch.device(value)
    return None
