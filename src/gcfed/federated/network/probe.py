"""Passes a few samples through a network before the first round, to find out how the engine must
treat it.

The passes (:mod:`~gcfed.federated.network.passes`) determine the network's :class:`Traits`. They
may also end in warnings, or in an error if no federated run can train the network correctly.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from gcfed.federated.network.lent import Traits, new_memory, travelling
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.passes import Pass, Passes, grads_of
from gcfed.federated.network.tap import Tap, dense_buffers
from gcfed.federated.protocol.messages import Params
from gcfed.models.facts import (
    cannot_stack,
    first_weight,
    shows_all_at_once,
    uses_batch_statistics,
)
from gcfed.models.own import reason
from gcfed.models.snapshot import GENERATORS, HOOKS
from gcfed.models.spectral import unit_vectors
from gcfed.models.unchanged import attributes, hand_copies, unchanged
from gcfed.tasks import Task
from gcfed.utils.layout import in_memory_order
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import seed_generators

log = logging.getLogger(__name__)
SAMPLES = 8
PIECE = 1 << 20  # entries that are compared at a time


def set_traits(module: FederatedModule, data: Any, stack: int | str) -> None:
    """Probes a module's network, on samples of the largest client, and lets the module adopt the
    traits.
    """
    like = first_weight(module.net)
    data.to_device(like.device, like.dtype, module.memory_format)
    module.task.to(like.device, like.dtype)
    own, others = _two_batches(data)
    x_B, y_B = data.fetch(torch.as_tensor(own, device=like.device), None)
    others_B, _ = data.fetch(torch.as_tensor(others, device=like.device), None)
    module.adopt(probe(module.net, x_B, y_B, module.task, stack, others_B))


def _two_batches(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Indices of samples of the largest client, ``[B]``, and of as many other samples ``[B]``, of
    other clients if there are any.
    """
    sizes = data.sizes(np.arange(data.num_clients))
    largest, *rest = np.argsort(-sizes, kind="stable")[: SAMPLES + 1].tolist()
    own = data.client(largest)
    of_others = [data.client(client)[:SAMPLES] for client in rest]
    others = np.concatenate([*of_others, own[SAMPLES:], own])
    size = min(len(own), SAMPLES)
    return own[:size], others[:size]


def probe(
    net: nn.Module,
    x_B: Tensor,
    y_B: Tensor,
    task: Task,
    stack: int | str = 2,
    others_B: Tensor | None = None,
) -> Traits:
    """Finds the traits of a network from samples ``[B, *input]`` and their labels.

    Afterwards the network is as before.

    Args:
        others_B: other samples, which some passes see first; by default the same in reverse order.

    Raises ValueError if the network fails on the samples, or does something that no federated run
    can do right.
    """
    if others_B is None:
        others_B = x_B.flip(0)
    with unchanged(net, task) as fresh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Probe(Passes(net, fresh, x_B, y_B, others_B, task)).traits(stack)


class _Probe:
    """Draws conclusions from passes."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.net = passes.net
        self.name = passes.name
        self.marks = {name: mark for name, (_, mark) in attributes(self.net).items()}
        self.sparse = [(t, t.to_dense()) for t in self.net.buffers() if t.layout != torch.strided]
        self.keeps = False  # whether it keeps something in attributes that can begin anew

    def warn(self, text: str) -> None:
        log.warning("%s %s", self.name, text)

    def traits(self, stack: int | str) -> Traits:
        passes = self.passes
        first = passes.first()
        if passes.task.has_classes:
            passes.y = spread_labels(passes.y, first.out.shape[-1])
        if passes.unregistered:
            self.warn(
                f"has {len(passes.unregistered)} weights that are no parameters of it, so nothing"
                " trains them. Register them in __init__: self.w = nn.Parameter(…), or an"
                " nn.ParameterList."
            )
        self.refuse(first)
        moved = self.moved(first)
        single = self.fails_on_one()
        functional = ""
        alone = cannot_stack(self.net)
        is_own_task = not type(passes.task).__module__.startswith("gcfed.")
        state = self.state_in_task(first) if is_own_task else ""
        if is_own_task or not shows_all_at_once(self.net, stack):
            hidden = self.look_again(first)
            del first  # the memory of two models
            functional, why = self.look_closer(hidden, moved, trains_alone(stack, passes.x))
            alone = alone or state or why
        if alone and "client.stack" not in alone:
            alone += ". Set client.stack=1"
        return Traits(
            moved=moved,
            edits_input=passes.edits_input,
            contiguous=passes.contiguous,
            functional=functional,
            alone=alone,
            single=single,
            assigns=bool(passes.replaced),
            keeps=self.keeps,
            ties=passes.ties,
        )

    def fails_on_one(self) -> str:
        """Why a batch of a single sample fails; empty if it does not."""
        if not uses_batch_statistics(self.net):
            return ""
        try:
            self.passes.run(self.passes.x[:1])
        except Exception as error:
            why = reason(error.__cause__ or error)
            return f"{type(self.net).__name__} cannot train on a single sample ({why})"
        return ""

    def look_again(self, first: Pass) -> str:
        """Passes in evaluation mode, and after others.

        Returns why clients cannot train in one stack; empty if they can.
        """
        passes = self.passes
        # A test comes after training, whose steps change weights after a pass.
        trained = self.scaled(first.tensors, 1.1)
        test = passes.run(passes.x, training=False, start=trained)
        if test.changed:
            self.warn(
                f"changes {_few(test.changed)} in evaluation mode: a test would change the"
                " model. Put it under `if self.training:`."
            )
        return self.hidden_state(first, test, trained)

    def look_closer(self, hidden: str, moved: Sequence[str], alone: bool) -> tuple[str, str]:
        """Passes on other tensors and with other samples.

        Args:
            hidden: what :meth:`look_again` found.
            alone: whether clients train one by one in any case.

        Returns:
            Why a client's numbers differ in a call on other tensors, and why clients cannot train
            in one stack; empty if they do not and can.
        """
        copies: Any = nullcontext()
        if self.passes.edits_input:
            copies = self.net.register_forward_pre_hook(hand_copies)
        with copies:
            functional = self.on_other_tensors()
            stacked = self.draws_for_all() if alone else self.in_stacks(moved)
            if not hidden:
                self.own_memory()
            return functional, hidden or functional or self.rows_meet() or stacked

    def scaled(self, tensors: Params, factor: float) -> Params:
        """These tensors, the trained ones times a factor."""
        scaled = dict(tensors)
        for name in self.passes.trained:
            scaled[name] = tensors[name] * factor
        return scaled

    def refuse(self, first: Pass) -> None:
        """Raises ValueError if no federated run can train the network correctly."""
        self.refuse_parameters(first)
        self.refuse_sparse_buffers()
        passes = self.passes
        before = passes.before
        saved = self.net.state_dict()
        numbers = {*passes.trained, *first.changed}
        imaginary = [name for name, t in before.items() if t.is_complex() and name in numbers]
        if imaginary:
            raise Refusal(
                f"{self.name} changes the complex {_few(imaginary)}: keep torch.view_as_real of it."
            )
        new = {name for name in dense_buffers(self.net) if name in saved} - before.keys()
        if new:
            raise Refusal(
                f"{self.name} makes the buffer {_few(sorted(new))} in forward: register its value"
                " in __init__."
            )
        resized = [
            name for name in first.changed if first.tensors[name].shape != before[name].shape
        ]
        if resized:
            raise Refusal(
                f"{self.name} changes the shape of {_few(resized)}: give a buffer one size in"
                " __init__."
            )

    def refuse_parameters(self, first: Pass) -> None:
        passes = self.passes
        new = {name for name, _ in self.net.named_parameters()} - passes.before.keys()
        if new:
            raise Refusal(
                f"{self.name} makes the parameter {_few(sorted(new))} in forward, where no"
                " optimizer knows it: make it in __init__, or use a layer such as nn.LazyLinear."
            )
        replaced = sorted(passes.replaced & {*passes.trained})
        if replaced:
            raise new_memory(replaced[0])
        if any(t.layout != torch.strided for t in first.grads):
            raise Refusal(f"{self.name} gets sparse gradients: set sparse=False in its layers.")
        own = {id(t) for t in passes.lent.tensors.values() if isinstance(t, nn.Parameter)}
        if {id(p) for p in self.net.parameters()} != own:
            raise Refusal(
                f"{self.name}.parameters() lacks some: set requires_grad=False in those instead."
            )

    def refuse_sparse_buffers(self) -> None:
        saved = self.net.state_dict()
        for name, t in self.net.named_buffers():
            if name in saved and t.layout != torch.strided:
                raise Refusal(
                    f"{self.name} has the sparse buffer {name}: register it with persistent=False,"
                    " because global_model.safetensors cannot hold it, or make it dense."
                )
        if any(not torch.equal(t.to_dense(), value) for t, value in self.sparse):
            raise Refusal(f"{self.name} changes a sparse buffer: keep it dense, or constant.")

    def moved(self, first: Pass) -> tuple[str, ...]:
        """The constants that training changes, which are then averaged.

        Raises ValueError for one that has no mean.
        """
        passes = self.passes
        saved = self.net.state_dict()
        constants = sorted(name for name in first.changed if name not in passes.trained)
        lost = [name for name in constants if name not in saved]
        if lost:
            self.warn(
                f"changes {_few(lost)}, which no checkpoint has (persistent=False): "
                "clients begin each round with its first value."
            )
        moved = []
        repaired = unit_vectors(self.net)
        for name in constants:
            if name in lost:
                continue
            old = passes.before[name]
            why = why_no_mean(old, first.tensors[name], is_repaired=name in repaired)
            if why:
                anew = "register it with persistent=False, so that clients begin anew"
                raise Refusal(f"{self.name} changes {name}, which {why}, or {anew}.")
            is_parameter = isinstance(passes.lent.tensors[name], nn.Parameter)
            if is_parameter or not old.is_floating_point():
                moved.append(name)
        if moved:
            log.info(
                "%s: training changes %s, which are averaged like buffers", self.name, _few(moved)
            )
        return tuple(moved)

    # The checks below return why clients cannot train in one stack; empty if they can.
    def hidden_state(self, first: Pass, test: Pass, trained: Params) -> str:
        """Repeats both passes, with the same tensors and seeds, in a network that has first seen
        other samples. Warns of anything else that earlier passes changed.
        """
        passes = self.passes
        passes.begin_anew()
        passes.run(passes.others)
        again = passes.run(passes.x)
        tested = passes.run(passes.x, training=False, start=trained)
        same = _close(again.out, first.out) and _close(tested.out, test.out)
        kept = self.changed_attributes(ignore_features=same)
        if same and not kept:
            return ""
        where = f"the attributes {_few(kept)}" if kept else "an attribute, a generator or a global"
        passes.begin_anew()
        self.keeps = _close(passes.run(passes.x).out, first.out)
        what = "clients share it, in the order in which they train"
        if self.keeps:
            what = "each of several clients begins each round with its first value"
        self.warn(
            f"keeps something from one call to the next in {where}: {what}, and no checkpoint"
            " has it. Make it a buffer (register_buffer), and draw from torch's global generator."
        )
        return "" if same else "state in plain attributes"

    def state_in_task(self, first: Pass) -> str:
        """Computes the loss of a batch again, after that of another one. Warns if it differs."""
        passes = self.passes
        passes.begin_anew()
        value = self.loss_of(first.out)
        self.loss_of(first.out.flip(0) * 1.1)
        if _close(self.loss_of(first.out), value):
            return ""
        passes.begin_anew()
        name = f"task={type(passes.task).__name__}"
        what = "clients and tests share it, in the order in which they come"
        if _close(self.loss_of(first.out), value):
            self.keeps = True
            what = "each of several clients begins each round with its first value"
        log.warning(
            "%s keeps something from one call to the next: %s, and no checkpoint has it.",
            name,
            what,
        )
        return f"state in its {name}"

    def loss_of(self, out: Tensor) -> Tensor:
        """The loss of outputs ``[B, …]``, always with the same random numbers."""
        passes = self.passes
        seed_generators(out.device, 0)
        y = passes.y
        out = out.clone().unsqueeze(0)
        return passes.next_loss(out, passes.x, y.unsqueeze(0), [len(y)]).detach()

    def changed_attributes(self, ignore_features: bool) -> list[str]:
        """Names of attributes that passes have changed.

        Many networks keep their last features, which no later pass reads.
        """
        changed = []
        for name, (value, mark) in attributes(self.net).items():
            is_feature = isinstance(value, (Tensor, *GENERATORS))
            if self.marks.get(name, mark) != mark and not (ignore_features and is_feature):
                changed.append(name)
        return changed

    def rows_meet(self) -> str:
        """Compares half of the samples, and the same with padding: with the first sample again and
        again.
        """
        passes = self.passes
        half = max(1, len(passes.x) // 2)
        x, y = passes.x.clone(), passes.y.clone()
        x[half:] = x[:1]
        y[half:] = y[:1]
        padded = passes.run(x, y=y, num_real=half)
        size = len(x) if passes.draws else half  # random draws depend on the size of a batch
        alone = passes.run(passes.x[:size], y=passes.y[:size], num_real=half)
        same = all(_close(padded.tensors[name], alone.tensors[name]) for name in padded.changed)
        if same and _all_close(
            [padded.out[:half], *padded.grads], [alone.out[:half], *alone.grads]
        ):
            return ""
        return (
            "batches whose samples influence each other, as in batch statistics or in a loss that"
            " counts labels, which would mix with padding"
        )

    def own_memory(self) -> None:
        """Refuses a network whose output differs if its own weights change, or if it is lent the
        changed weights.
        """
        passes = self.passes
        passes.begin_anew()  # calls on other tensors may have reached buffers through a list
        lent = passes.run(passes.x, start=self.scaled(passes.before, 1.1))
        for name in passes.trained:  # weights that share memory change twice
            passes.lent.tensors[name].data.mul_(1.1)
        if not _close(passes.run(passes.x, start={}).out, lent.out):
            raise Refusal(
                f"{self.name} keeps a weight's memory in another tensor (self.b ="
                " self.a.weight.t() or .data in __init__), but clients' weights have other memory:"
                " use self.a.weight in forward."
            )

    @property
    def comparable(self) -> bool:
        """Whether passes are compared in training mode. Dropout draws other masks in a stack, so
        it is compared in evaluation mode.
        """
        return "torch" not in self.passes.draws

    def on_other_tensors(self) -> str:
        """Why a client's numbers differ in a call on other tensors."""
        passes = self.passes
        counts = [len(passes.x)]
        state = self.scaled(passes.before, 1.1)
        own = passes.run(passes.x, self.comparable, passes.y, state, counts[0])
        call = Tap(self.net, False, False).on
        differs = self.differs(
            lambda state: call(state, passes.x)[0][0].unsqueeze(0),
            state,
            lambda out_KB: passes.loss(out_KB, passes.x[None], passes.y[None], counts),
            [own.out.unsqueeze(0), *own.grads],
        )
        if differs or self.has_hooks_on_gradients():
            return (
                "weights that forward reaches other than through its modules (lists, closures,"
                " hooks)"
            )
        return ""

    def draws_for_all(self) -> str:
        """Whether a stack would draw once for all its clients."""
        if {"numpy", "python"} & self.passes.draws:
            return "random numbers of NumPy or Python, drawn once for all of a stack"
        return ""

    def in_stacks(self, moved: Sequence[str]) -> str:
        """Why the numbers of two clients differ in a stack."""
        passes = self.passes
        x_KB, y_KB = (torch.stack([t, t.flip(0)]) for t in (passes.x, passes.y))
        counts = [len(passes.x), max(1, len(passes.x) // 2)]  # the second client has padding
        states = [self.scaled(passes.before, factor) for factor in (1.1, 1.2)]
        each = []
        for k, state in enumerate(states):
            each.append(passes.run(x_KB[k], self.comparable, y_KB[k], state, counts[k]))
        constants = self.constants(moved)
        both = {}
        for name in passes.before:
            if name not in constants:
                both[name] = torch.stack([state[name] for state in states])
        expected = [torch.stack(pair) for pair in zip(*map(_numbers, each), strict=True)]
        del states, each  # the memory of eight models
        in_stack = vmap(Tap(self.net, False, False).on, randomness="different")
        differs = self.differs(
            lambda state: in_stack(state, x_KB)[0][0],
            both,
            lambda out_KB: passes.loss(out_KB, x_KB, y_KB, counts),
            expected,
        )
        if self.draws_for_all():
            return self.draws_for_all()
        return differs and f"a forward that torch.func.vmap cannot batch ({differs})"

    def differs(
        self,
        outputs: Callable[[Params], Tensor],
        state: Params,
        loss: Callable[[Tensor], Tensor],
        expected: Sequence[Tensor],
    ) -> str:
        """How outputs and gradients on these tensors differ from those of passes in the network."""
        passes = self.passes
        try:
            for training in (True, self.comparable):
                seed_generators(passes.x.device, 0)
                self.net.train(training)
                leaves = {
                    name: t.clone().requires_grad_(name in passes.trained)
                    for name, t in state.items()
                }
                out_KB = outputs(leaves)
                returned = out_KB.detach().clone()  # a loss may edit it
                loss(out_KB).backward()
        except Exception as error:
            cause = error.__cause__ or error
            return f"{type(cause).__name__}: {reason(cause)}"
        found = [returned, *grads_of([leaves[name] for name in passes.trained])]
        return "" if _all_close(found, expected) else "other outputs or gradients"

    def constants(self, moved: Sequence[str]) -> set[str]:
        """Names of the tensors that all clients of a stack share."""
        numbers = {name for name, _ in self.net.named_parameters()}
        return set(self.passes.lent.saved) - numbers - {*travelling(self.net)} - {*moved}

    def has_hooks_on_gradients(self) -> bool:
        """Whether a parameter has hooks, which a call on other tensors does not reach."""
        return any(getattr(p, kind, None) for p in self.net.parameters() for kind in HOOKS)


def trains_alone(stack: int | str, x: Tensor) -> bool:
    """Whether clients train one at a time, whatever the network does: see ``Stacks.layout``."""
    return stack == 1 or (stack == "auto" and not x.is_cuda)


def spread_labels(y: Tensor, num_classes: int) -> Tensor:
    """Other labels ``[B]`` or ``[B, T]`` of several classes. Padding stays.

    A loss that counts the labels of a batch may not show it if all are equal.
    """
    rows = torch.arange(len(y), device=y.device).view(-1, *[1] * (y.dim() - 1))
    return y.where(y < 0, (y + rows) % num_classes)


def why_no_mean(old: Tensor, new: Tensor, is_repaired: bool) -> str:
    """Why clients' values of a tensor that passes change cannot be averaged; empty if they can.

    Args:
        is_repaired: whether the server makes its mean a unit vector again.
    """
    if not old.isfinite().all():
        return "begins at ±∞, so no difference to it can be sent: begin it at a finite number"
    if not is_repaired and _has_unit_rows(old) and _has_unit_rows(new):
        return (
            "has unit norm, and a mean of unit vectors is shorter: normalise it where forward"
            " reads it"
        )
    return ""


def _numbers(of_pass: Pass) -> list[Tensor]:
    return [of_pass.out, *of_pass.grads]


def _close(a: Tensor, b: Tensor, rounding: float = 0.0) -> bool:
    """Whether they are equal, except for the rounding of another order of sums."""
    if a.dtype != b.dtype or a.shape != b.shape:  # autocast in a stack may cast others
        return False
    if a.dtype == torch.bool:
        return torch.equal(a, b)
    atol = 1e-5 * _largest(b) + rounding
    # A comparison makes five copies, so it takes a piece at a time.
    [a], [b] = in_memory_order([a], [b])
    pieces = zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE), strict=True)
    return all(torch.allclose(p, q, rtol=1e-4, atol=atol, equal_nan=True) for p, q in pieces)


def _largest(t: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    if not t.numel():
        return 0.0
    if t.is_complex():
        return float(t.abs().max())
    low, high = torch.aminmax(t)
    return max(-float(low), float(high))


def _has_unit_rows(t: Tensor) -> bool:
    is_vector = t.is_floating_point() and t.dim() > 0 and t.shape[-1] > 1
    return is_vector and bool((t.norm(dim=-1) - 1).abs().max() < 1e-4)


def _all_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Compares outputs, then gradients.

    Some of these are 0 but for rounding, such as that of attention's key bias.
    """
    largest = max(map(_largest, expected[1:]), default=0.0)
    return all(map(_close, found, expected, [0.0, *[1e-6 * largest] * len(expected[1:])]))


def _few(names: Iterable[str]) -> str:
    return shorten(", ".join(names), 100, placeholder=" …")
