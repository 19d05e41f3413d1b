"""Passes a few samples through a network before the first round, to find out how the engine must
treat it.

The passes run in the user's own network, on copies of its tensors. They result in the network's
:class:`Traits`, in warnings, or in an error about what no federated run can do right.
"""

import logging
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from gcfed.federated.network.lent import Lent, Traits, new_memory, travelling
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.tap import Tap
from gcfed.federated.protocol.messages import Params
from gcfed.models.facts import (
    cannot_stack,
    first_weight,
    leaves,
    shows_all_at_once,
    uses_batch_statistics,
)
from gcfed.models.spectral import unit_vectors
from gcfed.models.unchanged import GENERATORS, attributes, hand_copies, mark, unchanged
from gcfed.tasks import Task
from gcfed.utils.rng import seed_generators

log = logging.getLogger(__name__)
SAMPLES = 8
GLOBAL = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "python": random._inst}


def set_traits(module: FederatedModule, data: Any, stack: int | str) -> None:
    """Probes a module's network, on samples of the largest client, and lets the module adopt the
    traits.
    """
    sizes, like = data.sizes(np.arange(data.num_clients)), first_weight(module.net)
    data.to_device(like.device, like.dtype, module.memory_format)
    samples = data.client(int(sizes.argmax()))[:SAMPLES]
    x_B, y_B = data.fetch(torch.as_tensor(samples, device=like.device), None)
    module.adopt(probe(module.net, x_B, y_B, module.task, stack))


def probe(net: nn.Module, x_B: Tensor, y_B: Tensor, task: Task, stack: int | str = 2) -> Traits:
    """Finds the traits of a network from samples ``[B, *input]`` and their labels.

    Afterwards the network is as before. Only its tensors are contiguous if it fails in
    ``channels_last``.

    Raises ValueError if the network fails on the samples, or does something that no federated run
    can do right.
    """
    with unchanged(net), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Probe(net, x_B, y_B, task).traits(stack)


class _Pass(NamedTuple):
    out: Tensor  # [B, …]
    grads: list[Tensor]  # of the trained parameters
    tensors: Params  # the network's tensors afterwards
    changed: list[str]  # the names of those that the pass changed


class _Probe:
    def __init__(self, net: nn.Module, x_B: Tensor, y_B: Tensor, task: Task) -> None:
        self.net, self.x, self.y, self.task, self.name = (
            net,
            x_B,
            y_B,
            task,
            f"model: {type(net).__name__}",
        )
        self.lent, self.marks = (
            Lent(net),
            {name: mark for name, (_, mark) in attributes(net).items()},
        )
        self.trained = [name for name, t in self.lent.tensors.items() if t.requires_grad]
        self.edits = False  # whether a pass wrote to its input
        self.unregistered = set[int]()  # ids of tensors that get gradients and are no parameters
        self.replaced = set[str]()  # names for which a pass made a new tensor
        self.draws = set[str]()  # the global generators that passes used

    def warn(self, text: str) -> None:
        log.warning("%s %s", self.name, text)

    def traits(self, stack: int | str) -> Traits:
        first, contiguous = self.first_pass()
        self.task.check(first.out, self.y)
        if self.unregistered:
            self.warn(
                f"has {len(self.unregistered)} weights that are no parameters of it, so nothing"
                " trains them. Register them in __init__: self.w = nn.Parameter(…), or an"
                " nn.ParameterList."
            )
        moved, functional, single, alone = self.moved(first), "", "", cannot_stack(self.net)
        if uses_batch_statistics(self.net):
            try:
                self.run(self.x[:1])
            except Exception as error:
                single = (
                    f"{type(self.net).__name__} cannot train on a single sample ({_short(error)})"
                )
        if not shows_all_at_once(self.net, stack):
            test = self.run(self.x, training=False)
            if test.changed:
                self.warn(
                    f"changes {_few(test.changed)} in evaluation mode: a test would change the"
                    " model. Put it under `if self.training:`."
                )
            with self.net.register_forward_pre_hook(hand_copies) if self.edits else nullcontext():
                hidden = self.hidden_state(first, test)
                functional, stacked = self.in_stacks(moved)
                if not hidden:
                    self.own_memory()
                alone = alone or hidden or functional or self.rows_meet() or stacked
            # functional_call reaches these through a list of buffers
            for name, t in self.before.items():
                self.lent.tensors[name].data.copy_(t)
        if alone and "client.stack" not in alone:
            alone += ". Set client.stack=1"
        return Traits(moved, self.edits, contiguous, functional, alone, single, bool(self.replaced))

    def first_pass(self, contiguous: bool = False) -> tuple[_Pass, bool]:
        """A forward and a backward pass, and whether they need the contiguous layout."""
        self.before = {name: t.detach().clone() for name, t in self.lent.tensors.items()}
        try:
            return self.run(self.x, y=self.y), contiguous
        except Exception as error:
            if contiguous:
                text = (
                    f"{self.name} fails on {len(self.x)} samples in training mode: {_short(error)}"
                )
                raise ValueError(text) from error
        # .contiguous() would leave the strides of a single channel as they are
        for t in self.lent.tensors.values():
            t.data = t.data.clone(memory_format=torch.contiguous_format)
        self.x = self.x.clone(memory_format=torch.contiguous_format)
        return self.first_pass(contiguous=True)

    def run(
        self, x: Tensor, training: bool = True, y: Tensor | None = None, start: Params | None = None
    ) -> _Pass:
        """A forward pass, with labels ``y`` of the first samples also a backward pass, on copies of
        ``start``, by default of the network's tensors. All passes draw the same random numbers.
        """
        seed_generators(x.device, 0)
        generators = {name: mark(generator) for name, generator in GLOBAL.items()}
        self.lent.begin(
            {name: t.clone() for name, t in (self.before if start is None else start).items()}
        )
        self.net.train(training)
        own = self.lent.tensors
        try:
            with torch.set_grad_enabled(y is not None):
                out = self.net(seen := x.clone())
                if y is not None:
                    if (
                        loss := self.task.losses(out[: len(y)], y).sum()
                    ).isnan() and x.isfinite().all():
                        raise ValueError("its loss is not a number before anything is trained")
                    loss.backward()
                    self.unregistered = leaves(loss) - {id(t) for t in own.values()}
            self.edits |= seen._version > 0 or not torch.equal(seen, x)
            self.draws |= {
                name for name, generator in GLOBAL.items() if mark(generator) != generators[name]
            }
            self.replaced |= self.lent.replaced()
            tensors = self.lent.present()
            changed = [name for name, t in tensors.items() if not _equal(t, self.before[name])]
            return _Pass(
                out.detach().clone(), _grads([own[name] for name in self.trained]), tensors, changed
            )
        finally:
            self.lent.end()
            for t in own.values():
                t.grad = None

    def moved(self, first: _Pass) -> tuple[str, ...]:
        """The constants that training changes, which are then averaged.

        Refuses what cannot be averaged.
        """
        if replaced := sorted(self.replaced & {*self.trained}):
            raise new_memory(replaced[0])
        saved, own = self.net.state_dict(), self.lent.tensors
        if any(t.layout != torch.strided for t in first.grads):
            raise ValueError(f"{self.name} gets sparse gradients: set sparse=False in its layers.")
        if {*map(id, self.net.parameters())} != {
            id(t) for t in own.values() if isinstance(t, nn.Parameter)
        }:
            raise ValueError(
                f"{self.name}.parameters() lacks some: set requires_grad=False in those instead."
            )
        if imaginary := [
            n for n, t in own.items() if t.is_complex() and n in (*self.trained, *first.changed)
        ]:
            raise ValueError(
                f"{self.name} changes the complex {_few(imaginary)}: keep torch.view_as_real of it."
            )
        if (
            new := {name for name, _ in self.net.named_buffers() if name in saved}
            - self.before.keys()
        ):
            raise ValueError(
                f"{self.name} makes the buffer {_few(new)} in forward: register its value in"
                " __init__."
            )
        if resized := [
            name for name in first.changed if first.tensors[name].shape != self.before[name].shape
        ]:
            raise ValueError(
                f"{self.name} changes the shape of {_few(resized)}: give a buffer one size in"
                " __init__."
            )
        constants = [name for name in first.changed if name not in self.trained]
        if lost := [name for name in constants if name not in saved]:
            self.warn(
                f"changes {_few(lost)}, which no checkpoint has (persistent=False): "
                "clients begin each round with its first value."
            )
        found, repaired = list[str](), unit_vectors(self.net)
        for name in sorted(name for name in constants if name in saved):
            old, why = self.before[name], ""
            if not old.isfinite().all():
                why = (
                    "begins at ±∞, so no difference to it can be sent: begin it at a finite number"
                )
            elif (
                name not in repaired and _has_unit_rows(old) and _has_unit_rows(first.tensors[name])
            ):
                why = (
                    "has unit norm, and a mean of unit vectors is shorter: normalise it where"
                    " forward reads it"
                )
            if why:
                anew = "register it with persistent=False, so that clients begin anew"
                raise ValueError(f"{self.name} changes {name}, which {why}, or {anew}.")
            if not old.is_floating_point() or isinstance(own[name], nn.Parameter):
                found.append(name)
        if found:
            log.info(
                "%s: training changes %s, which are averaged like buffers", self.name, _few(found)
            )
        return tuple(found)

    # The checks below return why clients cannot train in one stack; empty if they can.
    def hidden_state(self, first: _Pass, test: _Pass) -> str:
        """Repeats both passes, with the same tensors and seeds.

        Warns of anything else that earlier passes changed.
        """
        again, tested = self.run(self.x), self.run(self.x, training=False)
        same = _close(again.out, first.out) and _close(tested.out, test.out)
        kept = {
            n: value
            for n, (value, mark) in attributes(self.net).items()
            if self.marks.get(n, mark) != mark
        }
        if same:  # many networks keep their last features, which no later pass reads
            kept = {
                name: value
                for name, value in kept.items()
                if not isinstance(value, (Tensor, *GENERATORS))
            }
        if kept or not same:
            where = (
                f"the attributes {_few(kept)}" if kept else "an attribute, a generator or a global"
            )
            self.warn(
                f"keeps something from one call to the next in {where}: clients share it, in the"
                " order in which they train, and no checkpoint has it. Make it a buffer"
                " (register_buffer), and draw from torch's global generator."
            )
        return "" if same else "state in plain attributes"

    def rows_meet(self) -> str:
        """Compares half of the samples, and the same with padding: with the first sample again and
        again.
        """
        half, x = max(1, len(self.x) // 2), self.x.clone()
        x[half:] = x[:1]
        # Random draws depend on the size of a batch.
        padded, alone = (
            self.run(a, y=self.y[:half]) for a in (x, self.x if self.draws else self.x[:half])
        )
        same = all(_close(padded.tensors[name], alone.tensors[name]) for name in padded.changed)
        if same and _all_close(
            [padded.out[:half], *padded.grads], [alone.out[:half], *alone.grads]
        ):
            return ""
        return (
            "batches whose samples influence each other, as in batch statistics, which would mix"
            " with padding"
        )

    def own_memory(self) -> None:
        """Refuses a network whose output differs if its own weights change, or if it is lent the
        changed weights.
        """
        lent = self.run(
            self.x, start={n: t * 1.1 if n in self.trained else t for n, t in self.before.items()}
        )
        for name in self.trained:  # weights that share memory change twice
            self.lent.tensors[name].data.mul_(1.1)
        if not _close(self.run(self.x, start={}).out, lent.out):
            text = (
                f"{self.name} keeps a weight's memory in another tensor (self.b = self.a.weight.t()"
                " or .data in "
            )
            raise ValueError(
                f"{text}__init__), but clients' weights have other memory: use self.a.weight in"
                " forward."
            )

    def in_stacks(self, moved: Sequence[str]) -> tuple[str, str]:
        """Why a client's numbers differ in a call on other tensors, and why those of two clients
        differ in a stack.
        """
        # dropout draws other masks in a stack, so it is compared in evaluation mode
        fixed = "torch" not in self.draws
        x_KB, y_KB = (torch.stack([t, t.flip(0)]) for t in (self.x, self.y))
        states = [
            self.before | {name: self.before[name] * scale for name in self.trained}
            for scale in (1.1, 1.2)
        ]
        each = [self.run(x_KB[k], fixed, y_KB[k], states[k]) for k in (0, 1)]

        def differs(
            call: Callable[..., Any], x: Tensor, y: Tensor, state: Params, expected: list[Tensor]
        ) -> str:
            try:
                for training in (True, fixed):
                    seed_generators(x.device, 0)
                    self.net.train(training)
                    leaves = {
                        name: t.clone().requires_grad_(name in self.trained)
                        for name, t in state.items()
                    }
                    out = call(leaves, x)[0][0]
                    self.task.losses(out, y).sum().backward()
            except Exception as error:
                return f"{type(error).__name__}: {_short(error)}"
            found = [out.detach(), *_grads([leaves[name] for name in self.trained])]
            return "" if _all_close(found, expected) else "other outputs or gradients"

        call = Tap(self.net, False, False).on
        functional = differs(call, x_KB[0], y_KB[0], states[0], [each[0].out, *each[0].grads])
        constants = self.lent.saved - {
            *dict(self.net.named_parameters()),
            *travelling(self.net),
            *moved,
        }
        both = {
            name: torch.stack([state[name] for state in states])
            for name in self.before
            if name not in constants
        }
        expected = [
            torch.stack(pair) for pair in zip(*([p.out, *p.grads] for p in each), strict=True)
        ]
        stacked = differs(vmap(call, randomness="different"), x_KB, y_KB, both, expected)
        if functional:
            functional = (
                "weights that forward reaches other than through its modules (lists, closures,"
                " hooks)"
            )
        if {"numpy", "python"} & self.draws:
            return functional, "random numbers of NumPy or Python, drawn once for all of a stack"
        return functional, stacked and f"a forward that torch.func.vmap cannot batch ({stacked})"


def _grads(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _close(a: Tensor, b: Tensor, rounding: float = 0.0) -> bool:
    """Whether they are equal, except for the rounding of another order of sums."""
    a, b = (t.to(torch.uint8) if t.dtype == torch.bool else t for t in (a, b))
    scale = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(
        a, b, rtol=1e-4, atol=1e-5 * scale + rounding, equal_nan=True
    )


def _has_unit_rows(t: Tensor) -> bool:
    is_vector = t.is_floating_point() and t.dim() > 0 and t.shape[-1] > 1
    return is_vector and bool((t.norm(dim=-1) - 1).abs().max() < 1e-4)


def _all_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Compares outputs, then gradients.

    Some of these are 0 but for rounding, such as that of attention's key bias.
    """
    largest = max((float(t.abs().max()) for t in expected[1:] if t.numel()), default=0.0)
    return all(map(_close, found, expected, [0.0, *[1e-6 * largest] * len(expected[1:])]))


def _short(error: Exception) -> str:
    return shorten(str(error).split(". ")[0], 300)


def _few(names: Iterable[str]) -> str:
    return shorten(", ".join(names), 100, placeholder=" …")
