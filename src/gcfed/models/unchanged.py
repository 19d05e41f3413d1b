"""Leaves a network and its inputs as they were."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gcfed.models.snapshot import CONTAINERS, GENERATORS, OWN, PLAIN, Snapshot
from gcfed.utils.refusal import Refusal


@contextmanager
def unchanged(*roots: object) -> Iterator[Snapshot]:
    """After the block, the network, and the task if it is given, are as before (:class:`Snapshot`),
    and so are the global random generators.
    """
    before = Snapshot(*roots)
    states = _collect_rng_states(torch.cuda.is_initialized())
    try:
        yield before
    finally:
        before.restore()
        _set_rng_states(states)


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


class Unedited:
    """A context that raises Refusal if its block changes ``x``.

    A network that changes its input in the probe receives copies, and is not refused here.
    """

    # no ``contextmanager``, which takes twice as many calls in each local step

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.version = None if x.is_inference() else x._version

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self.version is not None and self.x._version != self.version:
            raise Refusal(
                "model: forward changes its input in some steps only: begin it with x = x.clone()."
            )


def attributes(net: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Numbers, tensors, generators and containers in attributes of modules: name → value, and a
    mark of its state.
    """
    kinds = (*PLAIN, *CONTAINERS, Tensor, *GENERATORS)
    marks = {}
    for name, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in vars(module).items():
            if isinstance(value, kinds) and key not in OWN:
                marks[f"{name}.{key}".lstrip(".")] = (value, mark(value))
    return marks


def mark(value: Any) -> Any:
    """A value that is equal as long as the state of ``value`` is."""
    # without its tensors, because many networks keep features in a list
    if isinstance(value, CONTAINERS):
        return [pickle.dumps(leaf) for leaf in tree_leaves(value) if isinstance(leaf, PLAIN)]
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, Tensor):
        return id(value), value._version
    return pickle.dumps(value)
