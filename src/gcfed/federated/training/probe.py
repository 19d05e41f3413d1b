"""One look at a network before the first round: what would a federated run do to it, and it to the run?

A few samples pass through the user's own network, on copies of its tensors. From what it sees here follows what the
engine does differently for this network, and what it refuses.
"""

from __future__ import annotations

import logging
import pickle
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcfed.federated.module import FederatedModule
from gcfed.federated.training.forward import Params, hand_copies
from gcfed.federated.training.lent import Lent, Traits, new_memory
from gcfed.federated.training.network import broadcast_state, cannot_stack, is_graphable, travelling
from gcfed.federated.training.stack import ClientStack
from gcfed.models.spectral import unit_vectors
from gcfed.tasks import Task
from gcfed.utils.rng import seed_generators

log = logging.getLogger(__name__)
SAMPLES = 8
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
STATE = (bool, int, float, complex, str, type(None), Tensor, *GENERATORS)


def look(module: FederatedModule, data: Any) -> None:
    """Probes a module's network on samples of its largest client, and has the module adopt what was found.

    Raises:
        ValueError: as :func:`probe`.
    """
    sizes = data.sizes(np.arange(data.num_clients))
    like = next(module.net.parameters())
    data.to_device(like.device, like.dtype, module.memory_format)
    samples = data.client(int(sizes.argmax()))[:SAMPLES]
    x_B, y_B = data.fetch(torch.as_tensor(samples, device=like.device), None)
    module.adopt(probe(module.net, x_B, y_B, module.task))


def probe(net: nn.Module, x_B: Tensor, y_B: Tensor, task: Task) -> Traits:
    """Traits of a network, from samples ``[B, *input]`` and their labels.

    The network is as it was afterwards, but for the layout of its tensors where it fails in ``channels_last``.

    Raises:
        ValueError: it fails on the samples, or does what no federated run can do right; names the tensor and a remedy.
    """
    before, training = _attributes(net), net.training
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Probe(net, x_B, y_B, task).traits()
    finally:
        net.train(training)
        for module, key, value, copy in before.values():
            if isinstance(value, Tensor):
                value.detach().copy_(copy)
            setattr(module, key, value if isinstance(value, Tensor) else copy)


class _Probe:
    def __init__(self, net: nn.Module, x_B: Tensor, y_B: Tensor, task: Task) -> None:
        self.net, self.x, self.y, self.task, self.name = net, x_B, y_B, task, f"model: {type(net).__name__}"
        self.lent = Lent(net)

    def traits(self) -> Traits:
        contiguous = False
        try:
            edits = self.train()
        except Exception as error:
            if not any(t.dim() == 4 for t in (self.x, *self.lent.tensors.values())):
                raise self.failed(error) from error
            # .contiguous() would leave the strides of a single channel as they are.
            for t in self.lent.tensors.values():
                t.data = t.data.clone(memory_format=torch.contiguous_format)
            self.x, contiguous = self.x.clone(memory_format=torch.contiguous_format), True
            try:
                edits = self.train()
            except Exception as again:
                raise self.failed(again) from again
            log.info("%s fails in channels_last: it trains in the contiguous layout", self.name)
        moved, functional, alone = self.moved(), "", cannot_stack(self.net)
        if not _is_known(self.net):
            edits |= self.edits_in_tests()
            with self.net.register_forward_pre_hook(hand_copies) if edits else nullcontext():
                hidden, functional = self.hidden_state(), self.is_not_functional(moved)
                alone = alone or hidden or functional or self.rows_meet() or self.differs_in_a_stack(moved)
            for name, t in self.before.items():  # a list of buffers leads functional_call to these
                self.lent.tensors[name].data.copy_(t)
        if alone and "client.stack" not in alone:
            alone += ". Set client.stack=1"
        return Traits(moved, edits, contiguous, functional, alone, bool(self.replaced))

    def failed(self, error: Exception) -> ValueError:
        return ValueError(f"{self.name} fails on {len(self.x)} samples in training mode: {_short(error)}")

    @contextmanager
    def on_copies(self, training: bool = True) -> Iterator[None]:
        """The network on fresh copies of its tensors, with the same random numbers each time."""
        seed_generators(self.x.device, 0)
        self.lent.begin({name: t.clone() for name, t in self.before.items()})
        self.net.train(training)
        try:
            yield
        finally:
            self.lent.home()

    @torch.no_grad()
    def outputs(self, x: Tensor, training: bool = True) -> list[Tensor]:
        """What the network returns, and the buffers that training changes."""
        with self.on_copies(training):
            out = self.net(x.clone()).clone()
            return [out, *(t.clone() for name, t in self.lent.present().items() if name in self.changed)]

    def train(self) -> bool:
        """One forward and backward pass; notes what it did to the network's tensors and generators.

        Returns:
            Whether it changed its input.
        """
        lent, seen = self.lent, self.x.clone()
        self.before = {name: t.detach().clone() for name, t in lent.tensors.items()}
        attributes = _attributes(self.net)
        marks = {key: _mark(value) for key, (_, _, value, _) in attributes.items()}
        with self.on_copies():
            generators = _generators()
            try:
                outputs = self.net(seen)
                loss = self.task.losses(outputs, self.y).sum()
                if loss.isnan():
                    raise ValueError("its loss is not a number before anything is trained")
                strangers = _leaves(loss) - {id(t) for t in lent.tensors.values()}
                loss.backward()
                idle = [n for n, t in lent.tensors.items() if t.requires_grad and t.grad is None]
                self.draws = [name for name, state in _generators().items() if state != generators[name]]
                self.out, self.replaced, self.changed = outputs.detach().clone(), lent.replaced(), self.changes()
            finally:
                for t in lent.tensors.values():
                    t.grad = None
        now = {key: value for key, (_, _, value, _) in _attributes(self.net).items() if key in marks}
        self.kept = [k for k, v in now.items() if _mark(v) != marks[k] and k.split(".")[-1] != "training"]
        self.numbers = [key for key in self.kept if not isinstance(now[key], (Tensor, *GENERATORS))]
        if strangers:
            log.warning(
                "%s has %d weights that are no parameters of it, so nothing trains them. Register them in __init__: "
                "self.w = nn.Parameter(…), or an nn.ParameterList.", self.name, len(strangers),
            )  # fmt: skip
        if idle:
            log.info("%s: no gradient reaches %s in a first step", self.name, _few(idle))
        return self.is_edited(seen)

    def changes(self) -> Params:
        """Copies of the tensors that a pass has changed or replaced."""
        return {n: t.clone() for n, t in self.lent.present().items() if not _equal(t, self.before[n])}

    def moved(self) -> tuple[str, ...]:
        """The constants that training changes. Refuses what cannot be averaged."""
        kept, found = set(self.net.state_dict()), []
        lost = [name for name in self.changed if name not in kept and not self.lent.tensors[name].requires_grad]
        if lost:
            log.warning(
                "%s changes %s, which no checkpoint has (persistent=False): clients begin each round with its first "
                "value.", self.name, _few(lost),
            )  # fmt: skip
        for name in self.replaced:
            if self.lent.tensors[name].requires_grad:
                raise new_memory(name)
        averaged, anew = unit_vectors(self.net), "register it with persistent=False, so that clients begin anew"
        for name in self.changed.keys() & kept:
            own, old, new = self.lent.tensors[name], self.before[name], self.changed[name]
            if own.requires_grad:
                continue
            if not old.is_floating_point() or isinstance(own, nn.Parameter):
                found.append(name)
            if not old.isfinite().all():
                raise ValueError(
                    f"{self.name} changes {name}, which begins at ±∞, so no difference to it can be sent: begin it at "
                    f"a finite number, or {anew}."
                )
            if name not in averaged and _has_unit_rows(old) and _has_unit_rows(new):
                raise ValueError(
                    f"{self.name} keeps {name} at unit norm, and a mean of unit vectors is shorter than one: normalise "
                    f"it where forward reads it, or {anew}."
                )
        if found:
            log.info("%s: training changes %s, which are averaged like buffers", self.name, _few(sorted(found)))
        return tuple(sorted(found))

    def hidden_state(self) -> str:
        """Whether a pass depends on those before it by more than parameters, buffers and global generators."""
        tests, again = self.outputs(self.x, training=False)[0], self.outputs(self.x)[0]
        same = _close(again, self.out) and _close(self.outputs(self.x, training=False)[0], tests)
        if same and not self.numbers:
            return ""
        kept = self.numbers if same else self.kept  # many keep their last features, which nothing depends on
        where = f"the attributes {_few(kept)}" if kept else "an attribute, a generator or a global"
        log.warning(
            "%s keeps something from one call to the next in %s: clients share it, in the order in which they train, "
            "and no checkpoint has it. Make it a buffer (register_buffer), and draw from torch's global generator.",
            self.name, where,
        )  # fmt: skip
        return "" if same else "state in plain attributes"

    @torch.no_grad()
    def edits_in_tests(self) -> bool:
        """Whether forward changes its input in evaluation mode; warns if it changes tensors there."""
        with self.on_copies(training=False):
            self.net(seen := self.x.clone())
            moved = list(self.changes())
        if moved:
            log.warning(
                "%s changes %s in evaluation mode: a test would change the model. Put it under `if self.training:`.",
                self.name, _few(moved),
            )  # fmt: skip
        return self.is_edited(seen)

    def is_edited(self, x: Tensor) -> bool:
        """Whether a pass has changed this copy of the samples, or has written the same values to it."""
        return x._version > 0 or not torch.equal(x, self.x)

    def rows_meet(self) -> str:
        """Whether a sample's output, or a buffer, depends on the others of its batch, as on padding."""
        half = len(self.x) // 2
        other = self.x.clone()
        other[half:] = self.x[: len(self.x) - half].flip(0)
        (out, *buffers), (out_of_other, *others) = self.outputs(self.x), self.outputs(other)
        if half and _close(out_of_other[:half], out[:half]) and all(map(_close, others, buffers)):
            return ""
        return "batches whose samples influence each other, as in batch statistics, which would mix with padding"

    def is_not_functional(self, moved: Sequence[str]) -> str:
        """Whether ``functional_call`` on a client's weights has other outputs or gradients."""
        start = broadcast_state(self.net, (*travelling(self.net), *moved))
        lent, called = self.of_clients(start, [0]), None
        with suppress(Exception):
            called = self.of_clients(start, [0], lends=False)
        if called and all(map(_close, called, lent)):
            return ""
        return "weights that forward reaches other than through its modules (lists, closures, hooks on gradients)"

    def differs_in_a_stack(self, moved: Sequence[str]) -> str:
        """Whether two clients in a stack have other outputs and gradients than one after the other."""
        if {"numpy", "python"} & set(self.draws):
            return "random numbers of NumPy or Python, drawn once for all of a stack"
        start = broadcast_state(self.net, (*travelling(self.net), *moved))
        try:
            self.of_clients(start, [0, 1], training=True)
            together = self.of_clients(start, [0, 1])
        except Exception as error:
            return f"a forward that torch.func.vmap cannot batch ({type(error).__name__}: {_short(error)})"
        each = [self.of_clients(start, [client]) for client in (0, 1)]
        if all(_close(both, torch.cat(alone)) for both, *alone in zip(together, *each, strict=True)):
            return ""
        return "a forward that does something else under torch.func.vmap"

    def of_clients(self, start: Params, clients: list[int], lends: bool = True, training: bool = False) -> list[Tensor]:
        """Outputs and gradients of clients with weights of their own, ``[K, …]`` each."""
        ones = np.ones(len(clients), np.int64)
        self.net.train(training or "torch" not in self.draws)  # dropout draws other masks in a stack
        seed_generators(self.x.device, 0)
        stack = ClientStack(self.net, start, np.array(clients), ones, ones, task=self.task, lent=self.lent, lends=lends)
        try:
            for row, client in enumerate(clients):
                for name in stack.leaves:
                    stack.full[name][row].mul_(1.1 + 0.1 * client)
            x_KB = torch.stack([self.x, self.x.flip(0)])[clients]
            y_KB = torch.stack([self.y, self.y.flip(0)])[clients]
            out = stack(x_KB).logits_KBC
            stack.backward(self.task.losses(out, y_KB).flatten(1).sum(1))
            grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in stack.leaves.values()]
            return [out.detach(), *grads]
        finally:
            stack.end()
            for t in self.lent.tensors.values():
                t.grad = None


def _is_known(net: nn.Module) -> bool:
    """Whether it is made of layers that are known, and of no hooks: nothing of it needs a closer look."""
    tensors = [*net.parameters(), *net.buffers()]
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())
    hooked |= any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors)
    scripted = any(isinstance(m, torch.jit.ScriptModule) for m in net.modules())
    said = any(getattr(m, "graphable", False) for m in net.modules())  # by a user's module of itself
    return is_graphable(net) and not (hooked or scripted or said)


def _attributes(net: nn.Module) -> dict[str, tuple[nn.Module, str, Any, Any]]:
    """Numbers, tensors and generators that modules keep in plain attributes, by full name: each also as a copy."""
    memo: dict[int, Any] = {}
    return {
        f"{name}.{key}".lstrip("."): (
            module, key, value, value.detach().clone() if isinstance(value, Tensor) else deepcopy(value, memo),
        )
        for name, module in net.named_modules() if not isinstance(module, torch.jit.ScriptModule)
        for key, value in vars(module).items() if isinstance(value, STATE)
    }  # fmt: skip


def _mark(value: Any) -> Any:
    """Differs once an attribute has changed."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return pickle.dumps(value) if isinstance(value, GENERATORS) else repr(value)


def _generators() -> dict[str, Any]:
    """Marks of the global generators."""
    known = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "python": random._inst}
    return {name: _mark(value) for name, value in known.items()}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal but for the rounding of another order of sums."""
    a, b = (t.to(torch.uint8) if t.dtype == torch.bool else t for t in (a, b))
    scale = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def _has_unit_rows(t: Tensor) -> bool:
    if not t.is_floating_point() or t.dim() == 0 or t.shape[-1] < 2:
        return False
    return bool((t.norm(dim=-1) - 1).abs().max() < 1e-4)


def _leaves(loss: Tensor) -> set[int]:
    """The ids of the tensors to which a backward pass adds gradients."""
    found, todo, seen = set(), [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {id(node.variable)} if hasattr(node, "variable") else set()
            todo += [following for following, _ in node.next_functions]
    return found


def _short(error: Exception) -> str:
    return " ".join(str(error).split(". ")[0].split())[:300]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
