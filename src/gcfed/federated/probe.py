"""One look at a network before the first round: what would a federated run do to it, and it to the run?

A few samples pass through the user's own network, on copies of its tensors. Whatever the engine must do differently
for this network, and whatever it refuses, follows from what it sees here.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcfed.federated.forward import Params, hand_copies
from gcfed.federated.lent import Lent, Traits, new_memory
from gcfed.federated.module import FederatedModule
from gcfed.federated.stack import ClientStack, broadcast_state, cannot_stack, is_graphable, travelling
from gcfed.models.spectral import unit_vectors
from gcfed.tasks import Task
from gcfed.utils.rng import seed_generators

log = logging.getLogger(__name__)
SAMPLES = 8
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def look(module: FederatedModule, data: Any) -> None:
    """Probes a module's network on samples of its largest client, and has the module adopt what was found.

    Raises:
        ValueError: as :func:`probe`.
    """
    sizes = data.sizes(np.arange(data.num_clients))
    device = next(module.net.parameters()).device
    data.to_device(device, next(module.net.parameters()).dtype, module.memory_format)
    samples = data.client(int(sizes.argmax()))[:SAMPLES]
    x_B, y_B = data.fetch(torch.as_tensor(samples, device=device), None)
    module.adopt(probe(module.net, x_B, y_B, module.task))


def probe(net: nn.Module, x_B: Tensor, y_B: Tensor, task: Task) -> Traits:
    """Traits of a network, from samples ``[B, *input]`` and their labels.

    The network is as it was afterwards, but for the layout of its tensors where it fails in ``channels_last``.

    Raises:
        ValueError: it fails on the samples, or does what no federated run can do right; names the tensor and a remedy.
    """
    with _left_as_it_was(net), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Probe(net, x_B, y_B, task).traits()


class _Probe:
    def __init__(self, net: nn.Module, x_B: Tensor, y_B: Tensor, task: Task) -> None:
        self.net, self.x, self.y, self.task, self.name = net, x_B, y_B, task, f"model: {type(net).__name__}"
        self.lent = Lent(net)

    def traits(self) -> Traits:
        contiguous, seen = False, self.x.clone()
        try:
            self.train(seen)
        except Exception as error:
            if not any(t.dim() == 4 for t in (self.x, *self.lent.tensors.values())):
                raise self.failed(error) from error
            # .contiguous() would leave the strides of a single channel as they are.
            for t in self.lent.tensors.values():
                t.data = t.data.clone(memory_format=torch.contiguous_format)
            self.x, contiguous = self.x.clone(memory_format=torch.contiguous_format), True
            try:
                self.train(seen := self.x.clone())
            except Exception as again:
                raise self.failed(again) from again
            log.info("%s fails in channels_last: it trains in the contiguous layout", self.name)
        moved, edits, functional, alone = self.moved(), self.is_edited(seen), "", cannot_stack(self.net)
        if not _is_known(self.net):
            edits |= self.edits_in_tests()
            copies = self.net.register_forward_pre_hook(hand_copies) if edits else nullcontext()
            with copies:
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

    def train(self, x: Tensor) -> None:
        """One forward and backward pass; notes what it did to the network's tensors and generators."""
        self.before = {name: t.detach().clone() for name, t in self.lent.tensors.items()}
        lent, attributes = self.lent, _snapshot(self.net)
        with self.on_copies():
            generators = _generators()
            try:
                outputs = self.net(x)
                loss = self.task.losses(outputs, self.y).sum()
                strangers = _leaves(loss) - {id(t) for t in lent.tensors.values()}
                loss.backward()
                self.draws = [name for name, state in _generators().items() if not _equal(state, generators[name])]
                self.out, self.replaced = outputs.detach().clone(), lent.replaced()
                changed = {n: t for n, t in lent.present().items() if not _equal(t, self.before[n])}
                self.changed = {n: t.clone() for n, t in changed.items()}
                idle = [n for n, t in lent.tensors.items() if t.requires_grad and t.grad is None]
            finally:
                for t in lent.tensors.values():
                    t.grad = None
        now = _snapshot(self.net)
        self.kept = [
            key for key, (_, state) in now.items() if key in attributes and not _equal(state, attributes[key][1])
        ]
        self.numbers = [key for key in self.kept if not isinstance(now[key][0], (Tensor, *GENERATORS))]
        if strangers:
            log.warning(
                "%s has %d weights that are no parameters of it: nobody trains them. Register them in __init__, as "
                "self.w = nn.Parameter(…) or in an nn.ParameterList.", self.name, len(strangers),
            )  # fmt: skip
        if idle:
            log.info("%s: in a first step no gradient reaches %s", self.name, _few(idle))

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
        averaged = unit_vectors(self.net)
        for name in self.changed.keys() & kept:
            own, old, new = self.lent.tensors[name], self.before[name], self.changed[name]
            if own.requires_grad:
                continue
            if not old.is_floating_point():
                found.append(name)
                continue
            if not old.isfinite().all():
                raise ValueError(
                    f"{self.name} changes {name}, which begins at ±∞, so no difference to it can be sent: begin it at "
                    "a finite number, or register it with persistent=False, so that clients begin each round anew."
                )
            if name not in averaged and _has_unit_rows(old) and _has_unit_rows(new):
                raise ValueError(
                    f"{self.name} keeps {name} at unit norm, and a mean of unit vectors is shorter than one: normalise "
                    "it where forward reads it, or register it with persistent=False, so that clients begin each "
                    "round anew."
                )
            found += [name] * isinstance(own, nn.Parameter)
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
            moved = [n for n, t in self.lent.present().items() if not _equal(t, self.before[n])]
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


@contextmanager
def _left_as_it_was(net: nn.Module) -> Iterator[None]:
    """Brings back modes, numbers, tensors and generators that modules keep in plain attributes."""
    modes = [(module, module.training) for module in net.modules()]
    before = []
    for module in net.modules():
        for key, value in _attributes(module):
            state = value.detach().clone() if isinstance(value, Tensor) else _state(value)
            before.append((module, key, value, state))
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, key, value, state in before:
            if isinstance(value, Tensor):
                value.detach().copy_(state)
            elif isinstance(value, GENERATORS):
                _restore(value, state)
            setattr(module, key, value)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Numbers, tensors and generators that a module keeps in plain attributes."""
    kinds = (bool, int, float, complex, str, type(None), Tensor, *GENERATORS)
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [(key, value) for key, value in vars(module).items() if key != "training" and isinstance(value, kinds)]


def _snapshot(net: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The plain attributes of a network and their states, by full name."""
    return {
        f"{name}.{key}".lstrip("."): (
            value,
            (id(value), value._version) if isinstance(value, Tensor) else _state(value),
        )
        for name, module in net.named_modules()
        for key, value in _attributes(module)
    }


def _state(value: Any) -> Any:
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else value


def _restore(value: Any, state: Any) -> None:
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        value.set_state(state)


def _generators() -> dict[str, Any]:
    """The states of the global generators."""
    return {"torch": torch.get_rng_state(), "numpy": _state(np.random.mtrand._rand), "python": random.getstate()}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return repr(a) == repr(b)  # also of dicts and tuples with arrays, whose ends change with each draw


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal but for the rounding of another order of sums."""
    scale = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def _has_unit_rows(t: Tensor) -> bool:
    return t.dim() > 0 and t.shape[-1] > 1 and bool((t.norm(dim=-1) - 1).abs().max() < 1e-4)


def _leaves(loss: Tensor) -> set[int]:
    """The ids of the tensors whose gradients a backward pass adds up."""
    found, todo, seen = set(), [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [following for following, _ in node.next_functions]
    return found


def _short(error: Exception) -> str:
    return " ".join(str(error).split(". ")[0].split())[:300]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
