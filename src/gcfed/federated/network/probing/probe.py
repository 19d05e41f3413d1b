"""Passes a few samples through a network before the first round, to find out how the engine must
treat it.

The passes (:mod:`~gcfed.federated.network.probing.passes`) determine the network's
:class:`Traits`. They may also end in warnings, or in an error if no federated run can train the
network correctly.
"""

import logging
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gcfed.federated.network.lent_network import Traits
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.probing.closeness import is_close
from gcfed.federated.network.probing.hidden_state import HiddenState
from gcfed.federated.network.probing.passes import Pass, Passes
from gcfed.federated.network.probing.stackable import (
    differs_in_stacks,
    differs_on_other_tensors,
    draws_for_all,
    refuse_shared_memory,
    samples_interact,
)
from gcfed.federated.network.probing.untrainable import averaged_constants, few, refuse_untrainable
from gcfed.federated.protocol.messages import Params
from gcfed.models.facts import (
    cannot_stack,
    first_weight,
    keeps_statistics_of_instances,
    shows_all_at_once,
    uses_batch_statistics,
)
from gcfed.models.own import reason
from gcfed.models.unchanged import hand_copies, unchanged
from gcfed.tasks import Task
from gcfed.utils.ours import is_ours

log = logging.getLogger(__name__)
SAMPLES = 8


def set_traits(module: FederatedModule, data: Any, stack: int | str) -> None:
    """Probes a module's network, on samples of the largest client, and lets the module adopt the
    traits.
    """
    like = first_weight(module.net)
    data.to_device(like.device, like.dtype, module.memory_format)
    module.task.to(like.device, like.dtype)
    samples, others = _two_batches(data)
    x_B, y_B = data.fetch(torch.as_tensor(samples, device=like.device), None)
    others_B, _ = data.fetch(torch.as_tensor(others, device=like.device), None)
    module.adopt(probe(module.net, x_B, y_B, module.task, stack, others_B))


def _two_batches(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Indices of samples of the largest client, ``[B]``, and of as many other samples ``[B]``, of
    other clients if there are any.
    """
    sizes = data.sizes()
    largest, *rest = np.argsort(-sizes, kind="stable")[: SAMPLES + 1].tolist()
    samples = data.client(largest)
    of_others = [data.client(client)[:SAMPLES] for client in rest]
    others = np.concatenate([*of_others, samples[SAMPLES:], samples])
    size = min(len(samples), SAMPLES)
    return samples[:size], others[:size]


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

    Raises Refusal if the network fails on the samples, or does something that no federated run
    can do right.
    """
    if others_B is None:
        others_B = x_B.flip(0)
    with unchanged(net, task) as fresh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Probe(Passes(net, fresh, x_B, y_B, others_B, task)).traits(stack)


class Differences(NamedTuple):
    """Why a client's numbers differ from those that it has alone in the network, with its own
    samples; empty if they do not.
    """

    on_other_tensors: str = ""
    with_other_samples: str = ""
    in_a_stack: str = ""

    def first(self) -> str:
        return self.on_other_tensors or self.with_other_samples or self.in_a_stack


class _Probe:
    """Runs the passes in order, and draws the conclusions."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.net = passes.net
        self.hidden = HiddenState(passes)

    def traits(self, stack: int | str) -> Traits:
        passes = self.passes
        first = passes.first()
        if passes.task.has_classes:
            passes.y = spread_labels(passes.y, first.out.shape[-1])
        self.warn_of_unregistered()
        refuse_untrainable(passes, first)
        averaged = averaged_constants(passes, first)
        why_single_fails = self.why_single_fails()
        why_alone = cannot_stack(self.net)
        differences = Differences()
        is_users_task = not is_ours(type(passes.task).__module__)
        state = self.hidden.in_task(first) if is_users_task else ""
        if is_users_task or not shows_all_at_once(self.net, stack):
            hidden = self.compare_later_passes(first)
            del first  # the memory of two models
            differences = self.compare_in_a_stack(hidden, averaged, trains_alone(stack, passes.x))
            why_alone = why_alone or state or hidden or differences.first()
        elif not is_ours(type(self.net).__module__):
            self.warn_of_tests(first.tensors)
        if why_alone and "client.stack" not in why_alone:
            why_alone += ". Set client.stack=1"
        return Traits(
            averaged=averaged,
            edits_input=passes.edits_input,
            contiguous=passes.contiguous,
            why_not_functional=differences.on_other_tensors,
            why_alone=why_alone,
            why_single_fails=why_single_fails,
            mixes_samples=bool(differences.with_other_samples) or keeps_statistics(self.net),
            assigns=bool(passes.replaced),
            has_hidden_state=self.hidden.restorable,
        )

    def warn_of_unregistered(self) -> None:
        if self.passes.unregistered:
            log.warning(
                "%s has %d weights that are no parameters of it, so nothing trains them. Register"
                " them in __init__: self.w = nn.Parameter(…), or an nn.ParameterList.",
                self.passes.name,
                len(self.passes.unregistered),
            )

    def why_single_fails(self) -> str:
        """Why a batch of a single sample fails; empty if it works."""
        if not uses_batch_statistics(self.net):
            return ""
        try:
            self.passes.run(self.passes.x[:1])
        except Exception as error:
            why = reason(error.__cause__ or error)
            return f"{type(self.net).__name__} cannot train on a single sample ({why})"
        return ""

    def compare_later_passes(self, first: Pass) -> str:
        """Runs passes in evaluation mode, and after other passes.

        Returns why clients cannot train in one stack; empty if they can.
        """
        passes = self.passes
        # A test comes after training, whose steps change weights after a pass.
        trained = passes.scaled(first.tensors, 1.1)
        test = passes.run(passes.x, training=False, start=trained)
        if test.changed:
            log.warning(
                "%s changes %s in evaluation mode: a test would change the model. Put it under"
                " `if self.training:`.",
                passes.name,
                few(test.changed),
            )
        hidden = self.hidden.in_network(first, test, trained)
        if not hidden:
            self.warn_of_tests(trained)
        return hidden

    def warn_of_tests(self, start: Params) -> None:
        """Warns if a test depends on more than the model and each sample by itself."""
        passes = self.passes
        draws = passes.draws
        passes.draws = set()
        test = passes.run(passes.x, training=False, start=start)
        is_random = bool(passes.draws)
        passes.draws = draws | passes.draws
        if is_random:
            log.warning(
                "%s draws random numbers in evaluation mode, so that two tests of one model differ,"
                " also by the number of processes. Draw under `if self.training:`;"
                " F.dropout(x, p, self.training).",
                passes.name,
            )
            return
        half = max(1, len(passes.x) // 2)
        mixed_x = passes.x.clone()
        mixed_x[half:] = mixed_x[:1]
        mixed = passes.run(mixed_x, training=False, start=start)
        if not is_close(mixed.out[:half], test.out[:half]):
            log.warning(
                "%s mixes the samples of a batch in evaluation mode, so that tests depend on"
                " data.eval_batch_size and on the number of processes. Use running statistics, or"
                " GroupNorm.",
                passes.name,
            )

    def compare_in_a_stack(self, hidden: str, averaged: Sequence[str], alone: bool) -> Differences:
        """Runs passes on other tensors and with other samples.

        Args:
            hidden: what :meth:`compare_later_passes` found.
            averaged: the constants that training changes.
            alone: whether clients train one by one in any case.
        """
        passes = self.passes
        copies: Any = nullcontext()
        if passes.edits_input:
            copies = self.net.register_forward_pre_hook(hand_copies)
        with copies:
            on_other_tensors = differs_on_other_tensors(passes)
            stacked = draws_for_all(passes) if alone else differs_in_stacks(passes, averaged)
            mixed = ""
            if not hidden:  # with hidden state, all passes differ
                refuse_shared_memory(passes)
                mixed = samples_interact(passes)
            return Differences(on_other_tensors, mixed, stacked)


def keeps_statistics(net: nn.Module) -> bool:
    """Whether layers compute statistics of a batch, to normalise it or to keep them."""
    return uses_batch_statistics(net) or keeps_statistics_of_instances(net)


def trains_alone(stack: int | str, x: Tensor) -> bool:
    """Whether clients train one at a time, whatever the network does: see ``make_layout``."""
    return stack == 1 or (stack == "auto" and not x.is_cuda)


def spread_labels(y: Tensor, num_classes: int) -> Tensor:
    """Other labels ``[B]`` or ``[B, T]`` of several classes. Padding stays.

    A loss that counts the labels of a batch may not show it if all are equal.
    """
    rows = torch.arange(len(y), device=y.device).view(-1, *[1] * (y.dim() - 1))
    return y.where(y < 0, (y + rows) % num_classes)
