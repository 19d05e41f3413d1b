"""The mini-batches of each client in a round, and the local steps on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.training.stack import ClientStack
from gcfed.tasks import Batch
from gcfed.utils.device import on_device

# values of samples that a single client fetches at once; they stay in a core's cache
AHEAD = 1 << 18


class Kind(NamedTuple):
    """Steps of the same kind are the same operations: number of active clients, batch size, whether
    none is padded.
    """

    active: int
    size: int
    even: bool


@dataclass
class BatchPlan:
    """All local steps of K clients of one round, longest client first."""

    # sample indices, [K, T, B] on the device; padding repeats the client's first sample
    index: Tensor
    augment: Tensor | None  # augmentation draws, [K, T, B, A]
    # number of samples in each step, [K, T] on the host; 0 after a client has finished
    counts: np.ndarray

    def __post_init__(self) -> None:
        # first step; samples, labels, counts from there on
        self._ahead: tuple[int, list[tuple[Tensor, ...]]] = 0, []
        self._counts = on_device(self.counts, self.index.device, torch.float32)
        self.kinds: list[Kind] = []  # of each step, [T]
        for counts in zip(*self.counts.tolist(), strict=True):
            active = [count for count in counts if count]
            self.kinds.append(Kind(len(active), max(active), min(active) == max(active)))

    @property
    def tables(self) -> list[Tensor]:
        """The tensors that steps read, ``[K, T, …]`` on the device."""
        return [self._counts, self.index, *([] if self.augment is None else [self.augment])]

    def on(self, tables: Sequence[Tensor]) -> BatchPlan:
        """This plan with its tensors in these tables, ``[K, ≥ T, …]``."""
        plan = copy(self)
        plan._counts, plan.index, *draws = tables
        plan.augment = draws[0] if draws else None
        return plan

    @property
    def steps(self) -> np.ndarray:
        """Number of local steps of each client, ``[K]``."""
        return (self.counts > 0).sum(1)

    def padded(self) -> BatchPlan:
        """This plan with few kinds of steps: pads batches to multiples of 8 samples, which changes
        the last bits.
        """
        plan, full = copy(self), self.index.shape[2]
        plan.kinds = [
            (
                kind
                if kind.size == full
                else Kind(kind.active, min(-(-kind.size // 8) * 8, full), False)
            )
            for kind in self.kinds
        ]
        return plan

    def cut(self, steps: np.ndarray) -> BatchPlan:
        """The plan of clients that stop after this number of steps, ``[K]``."""
        longest = int(steps.max())
        counts = np.where(np.arange(longest) < steps[:, None], self.counts[:, :longest], 0)
        return BatchPlan(
            self.index[:, :longest],
            None if self.augment is None else self.augment[:, :longest],
            counts,
        )

    def batch(self, data: FederatedDataModule, step: int | Tensor, kind: Kind) -> Batch:
        """The active clients' batch of a step; the step's number may be a tensor ``[1]`` on the
        device.
        """
        n, size, even = kind

        def at(table: Tensor) -> Tensor:
            return (
                table[:n, step]
                if isinstance(step, int)
                else table[:n].index_select(1, step).squeeze(1)
            )

        if isinstance(step, int) and len(self.index) == 1:
            x, y, counts = self._of_one(data, step, size)
        else:
            x, y = data.fetch(
                at(self.index)[:, :size],
                None if self.augment is None else at(self.augment)[:, :size],
            )
            counts = at(self._counts)
        mask = rows = None
        if not even:
            mask = rows = torch.arange(size, device=counts.device) < counts[:, None]
        if y.dim() == 2 or y.is_floating_point():
            return Batch(x, y, mask, counts, rows)
        mask = y >= 0 if mask is None else (y >= 0) & mask.unsqueeze(-1)
        return Batch(x, y, mask, mask.flatten(1).sum(1), rows)

    def _of_one(
        self, data: FederatedDataModule, step: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A single client's samples, labels and count in a step.

        Those of the next steps are fetched at once.
        """
        first, fetched = self._ahead
        if not 0 <= step - first < len(fetched):
            width = int(self.counts.max())
            span = slice(step, step + max(1, AHEAD // (width * prod(data.input_shape))))
            draws = None if self.augment is None else self.augment[:, span, :width]
            tables = (*data.fetch(self.index[:, span, :width], draws), self._counts[:, span])
            self._ahead = first, fetched = (
                step,
                list(zip(*(t.unbind(1) for t in tables), strict=True)),
            )
        x, y, counts = fetched[step - first]
        if size < y.shape[1]:
            x, y = x[:, :size], y[:, :size]
        # The last bits of a matrix product may depend on the alignment of its memory.
        return x if x.data_ptr() % 64 == 0 else x.clone(), y, counts


def split(batch: Batch, n: int, dtype: torch.dtype) -> Iterator[tuple[Batch, Tensor]]:
    """Up to n parts of a batch, and their shares of each client's samples.

    Shares times means add up to its mean.
    """
    size = batch.y.shape[1]
    real = torch.full_like(batch.count, size) if batch.rows is None else batch.rows.sum(1)
    for start in range(0, size, width := -(-size // n)):
        at, share = slice(start, start + width), (real - start).clamp(0, width).to(dtype) / real
        mask = None if batch.mask is None else batch.mask[:, at]
        # If a client has no sample in a part, the padding counts as samples: the mean is then
        # finite, and its share 0.
        rows = None if batch.rows is None else batch.rows[:, at] | (share == 0).unsqueeze(1)
        yield (
            Batch(
                batch.x[:, at],
                batch.y[:, at],
                mask,
                (batch.count * share).where(share > 0, 1.0),
                rows,
            ),
            share,
        )


class Steps:
    """K clients that are ready to train, their batches, their optimizer (new in each round) and
    their losses.

    :mod:`gcfed.federated.graphs` has a version for GPUs.
    """

    def __init__(self, stack: ClientStack, plan: BatchPlan, optimizer: Optimizer) -> None:
        self.stack, self.plan, self.optimizer = stack, plan, optimizer
        self._losses: list[tuple[Tensor, ...]] = []

    def prepare(self, part: object, prepared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what the local steps read as ``stack.prepared[part]``."""
        return prepared

    def run(self, step: Callable[[int | Tensor, Kind], None], t: int, kind: Kind) -> None:
        """Runs step number t of all active clients; ``step`` takes its number and its kind."""
        step(t, kind)

    def first_done(self) -> None:
        """Called after the first step, in which an optimizer creates its state."""
        if self.optimizer.defaults.get("fused") and self.optimizer.defaults.get("momentum"):
            for leaf in self.stack.leaves.values():
                # no gradient in the first step
                if "momentum_buffer" not in (state := self.optimizer.state[leaf]):
                    state["momentum_buffer"] = torch.zeros_like(leaf)

    def note(self, number: int | Tensor, *values: Tensor) -> None:
        """Keeps the active clients' mean losses of a step and their numbers of labels, ``[n]``
        each.
        """
        self._losses.append(values)

    def mean_losses(self) -> Tensor:
        """Each client's mean loss over all its labels, ``[K]``."""
        # n never grows; a client that is done has zeros
        even = len(self._losses[0][0]) == len(self._losses[-1][0])
        losses, counts = (
            torch.stack(v) if even else pad_sequence([*v], True)
            for v in zip(*self._losses, strict=True)
        )
        return (losses * counts).sum(0) / counts.sum(0)
