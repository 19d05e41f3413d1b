"""The mini-batches of each client in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gcfed.data.datamodule import FederatedDataModule
from gcfed.tasks import Batch
from gcfed.utils.device import on_device

# values of samples that a single client fetches at once; they stay in a core's cache
VALUES_AHEAD = 1 << 18
GROUPS = 16  # numbers of active clients for which the steps of a large stack are recorded


class Kind(NamedTuple):
    """What distinguishes local steps: steps of the same kind do the same operations."""

    active: int  # number of clients that train
    size: int  # size of the largest batch
    even: bool  # whether all batches have this size, so that none is padded


@dataclass(frozen=True)
class Batching:
    """How a client's samples become mini-batches in each pass over them.

    Attributes:
        batch_size, last_batch: as in :class:`~gcfed.federated.training.solver.LocalSolver`.
    """

    batch_size: int
    last_batch: Literal["keep", "drop", "wrap"]

    def count(self, num_samples: int) -> int:
        """The number of mini-batches in a pass.

        It does not list them, because a site may state any number of samples.
        """
        whole, rest = divmod(num_samples, self.batch_size)
        dropped = self.last_batch == "drop" and whole > 0
        return whole + (rest > 0 and not dropped)

    def sizes(self, num_samples: int) -> list[int]:
        """The sizes of the mini-batches in a pass."""
        sizes = [self.batch_size] * self.count(num_samples)
        missing = sum(sizes) - num_samples  # samples that the last batch lacks
        if self.last_batch != "wrap" and missing > 0:
            sizes[-1] -= missing
        return sizes

    def draw(
        self, shuffle: np.random.Generator, samples: np.ndarray, num_steps: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A client's mini-batches, ``[T, width]``, and their sizes, ``[T]``.

        Padding repeats the client's first sample.
        """
        sizes = np.minimum(self.sizes(len(samples)), width)
        used = int(sum(sizes))  # samples of a pass
        first = samples[0]
        if self.last_batch == "wrap":  # whole batches, by repeating the first samples
            samples = np.resize(samples, used)
        num_passes = ceil(num_steps / len(sizes))
        orders = shuffle.permuted(np.broadcast_to(samples, (num_passes, len(samples))), axis=1)
        passes = np.full((num_passes, len(sizes) * width), first)
        passes[:, :used] = orders[:, :used]
        batches = passes.reshape(-1, width)
        return batches[:num_steps], np.tile(sizes, num_passes)[:num_steps]


@dataclass
class BatchPlan:
    """All local steps of K clients of one round, longest client first."""

    # sample indices, [K, T, B] on the device; padding repeats the client's first sample
    index: Tensor
    augment: Tensor | None  # augmentation draws, [K, T, B, A]
    # number of samples in each step, [K, T] on the host; 0 after a client has finished
    counts: np.ndarray

    def __post_init__(self) -> None:
        # Samples, labels and counts that a single client has fetched, from this step on.
        self._first_fetched = 0
        self._fetched: list[tuple[Tensor, ...]] = []
        self._counts = on_device(self.counts, self.index.device, torch.float32)
        self.kinds: list[Kind] = []  # the kind of each step, [T]
        for counts in self.counts.T.tolist():
            active = [count for count in counts if count]
            self.kinds.append(Kind(len(active), max(active), min(active) == max(active)))

    @property
    def tables(self) -> list[Tensor]:
        """The tensors that steps read, ``[K, T, …]`` on the device."""
        tables = [self._counts, self.index]
        if self.augment is not None:
            tables.append(self.augment)
        return tables

    def on(self, tables: Sequence[Tensor]) -> BatchPlan:
        """This plan with its tensors in these tables, ``[K, ≥ T, …]``."""
        plan = copy(self)
        plan._counts, plan.index, *draws = tables
        plan.augment = draws[0] if draws else None
        return plan

    @property
    def steps(self) -> np.ndarray:
        """Number of local steps of each client, ``[K]``."""
        steps_K: np.ndarray = (self.counts > 0).sum(1)
        return steps_K

    def padded(self) -> BatchPlan:
        """This plan with fewer kinds of steps: batches are padded to multiples of 8 samples.

        This changes the last bits.
        """
        plan = copy(self)
        full = self.index.shape[2]
        plan.kinds = []
        for kind in self.kinds:
            if kind.size < full:
                size = min(ceil(kind.size / 8) * 8, full)
                kind = Kind(kind.active, size, even=False)
            plan.kinds.append(kind)
        return plan

    def grouped(self) -> BatchPlan:
        """This plan with fewer kinds of steps: the number of clients that train is rounded up to a
        multiple of K/16. Clients that are done train on, and what they do must be undone. The other
        clients' last bits may change.
        """
        plan = copy(self)
        num_clients = len(self.counts)
        unit = max(1, num_clients // GROUPS)
        plan.kinds = []
        for kind in self.kinds:
            if kind.active > 1:  # a client alone uses other kernels, with other last bits
                rounded = min(ceil(kind.active / unit) * unit, num_clients)
                kind = kind._replace(active=rounded)
            plan.kinds.append(kind)
        return plan

    def cut(self, steps: np.ndarray) -> BatchPlan:
        """The plan of clients that stop after this number of steps, ``[K]``."""
        longest = int(steps.max())
        counts = np.where(np.arange(longest) < steps[:, None], self.counts[:, :longest], 0)
        augment = None if self.augment is None else self.augment[:, :longest]
        return BatchPlan(self.index[:, :longest], augment, counts)

    def batch(self, data: FederatedDataModule, step: int | Tensor, kind: Kind) -> Batch:
        """The active clients' batch of a step; the step's number may be a tensor ``[1]`` on the
        device.
        """
        if isinstance(step, int) and len(self.counts) == 1:
            x, y, counts = self._of_one(data, step, kind.size)
        else:
            index = self._at(self.index, step, kind)[:, : kind.size]
            draws = None
            if self.augment is not None:
                draws = self._at(self.augment, step, kind)[:, : kind.size]
            x, y = data.fetch(index, draws)
            counts = self._at(self._counts, step, kind)
        return Batch.of(x, y, counts, kind.even)

    def _at(self, table: Tensor, step: int | Tensor, kind: Kind) -> Tensor:
        """The active clients' rows of a table, ``[K, T, …]`` → ``[n, …]``, in a step."""
        active = table[: kind.active]
        if isinstance(step, int):
            return active[:, step]
        return active.index_select(1, step).squeeze(1)

    def _of_one(
        self, data: FederatedDataModule, step: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A single client's samples, labels and count in a step.

        It fetches those of the next steps, too.
        """
        if not 0 <= step - self._first_fetched < len(self._fetched):
            self._fetch(data, step)
        x, y, counts = self._fetched[step - self._first_fetched]
        if size < y.shape[1]:
            x = x[:, :size]
            y = y[:, :size]
        if x.data_ptr() % 64:  # the last bits of a matrix product may depend on the alignment
            x = x.clone()
        return x, y, counts

    def _fetch(self, data: FederatedDataModule, step: int) -> None:
        """Fetches a single client's batches from this step on."""
        width = int(self.counts.max())
        num_steps = max(1, VALUES_AHEAD // (width * prod(data.input_shape)))
        span = slice(step, step + num_steps)
        draws = None if self.augment is None else self.augment[:, span, :width]
        x, y = data.fetch(self.index[:, span, :width], draws)
        by_step = zip(x.unbind(1), y.unbind(1), self._counts[:, span].unbind(1), strict=True)
        self._first_fetched = step
        self._fetched = list(by_step)


def last_piece(size: int, n: int) -> int:
    """The size of the last piece of a batch that is split into at most ``n`` equal ones."""
    width = ceil(size / n)
    return size - width * (ceil(size / width) - 1)


def split(batch: Batch, n: int, dtype: torch.dtype) -> Iterator[tuple[Batch, Tensor]]:
    """Up to n pieces of a batch, and their shares of each client's samples.

    Shares times means add up to its mean.
    """
    size = batch.y.shape[1]
    real = torch.full_like(batch.count, size) if batch.rows is None else batch.rows.sum(1)
    width = ceil(size / n)
    for start in range(0, size, width):
        piece = slice(start, start + width)
        share = (real - start).clamp(0, width).to(dtype) / real
        mask = None if batch.mask is None else batch.mask[:, piece]
        rows = None
        if batch.rows is not None:
            # If a client has no sample in a piece, the padding counts as samples: the mean is then
            # finite, and its share 0.
            rows = batch.rows[:, piece] | (share == 0).unsqueeze(1)
        count = (batch.count * share).where(share > 0, 1.0)
        yield Batch(batch.x[:, piece], batch.y[:, piece], mask, count, rows), share
