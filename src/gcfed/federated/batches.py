"""Which samples a client sees in which local step: drawn on the host for a whole round, moved to the device once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gcfed.tasks import Batch
from gcfed.utils.device import on_device
from gcfed.utils.rng import generator


class ClientData(Protocol):
    """The clients' samples; ``FederatedDataModule`` is one, a test may bring its own."""

    def client(self, client: int) -> np.ndarray:
        """Indices of a client's samples, ``[n_k]``."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | None:
        """Random augmentation for ``shape`` samples, integers ``[*shape, A]``, or None."""

    def fetch(self, index: Tensor, augment: Tensor | None) -> tuple[Tensor, Tensor]:
        """Inputs ``[*index.shape, *input]`` and labels ``[*index.shape]`` on the device."""


class Kind(NamedTuple):
    """What two local steps must have in common to be the same operations: active clients, batch size, no padding."""

    active: int
    size: int
    even: bool


@dataclass
class BatchPlan:
    """All local steps of K clients of one round, longest client first.

    Attributes:
        index: sample indices, ``[K, T, B]`` on the device; a missing one repeats the client's first sample.
        augment: augmentation draws, ``[K, T, B, A]``, or None.
        counts: real samples of each step, ``[K, T]`` on the host; 0 once a client has finished.
        kinds: of each step, ``[T]``.
    """

    index: Tensor
    augment: Tensor | None
    counts: np.ndarray

    def __post_init__(self) -> None:
        self._counts = on_device(self.counts, self.index.device, torch.float32)
        even = ((self.counts == self.counts.max(0)) | (self.counts == 0)).all(0)
        kinds = zip((self.counts > 0).sum(0).tolist(), self.counts.max(0).tolist(), even.tolist(), strict=True)
        self.kinds = [Kind(*kind) for kind in kinds]

    @property
    def steps(self) -> np.ndarray:
        """Number of local steps of each client, ``[K]``."""
        return (self.counts > 0).sum(1)

    def cut(self, steps: np.ndarray) -> BatchPlan:
        """The plan of clients that stop after so many of their steps, ``[K]``."""
        longest = int(steps.max())
        counts = np.where(np.arange(longest) < steps[:, None], self.counts[:, :longest], 0)
        return BatchPlan(self.index[:, :longest], None if self.augment is None else self.augment[:, :longest], counts)

    def batch(self, data: ClientData, step: int | Tensor, kind: Kind) -> Batch:
        """A step of the clients that are not done by then; its number may be a tensor ``[1]`` on the device."""
        n, size, even = kind

        def at(table: Tensor) -> Tensor:
            return table[:n, step] if isinstance(step, int) else table[:n].index_select(1, step).squeeze(1)

        index, counts = at(self.index)[:, :size], at(self._counts)
        x, y = data.fetch(index, None if self.augment is None else at(self.augment)[:, :size])
        mask = rows = None
        if not even:
            mask = rows = torch.arange(size, device=index.device) < counts[:, None]
        if y.dim() == 2 or y.is_floating_point():
            return Batch(x, y, mask, counts, rows)
        mask = y >= 0 if mask is None else (y >= 0) & mask.unsqueeze(-1)
        return Batch(x, y, mask, mask.flatten(1).sum(1).clamp(min=1), rows)


def number_of_steps(size: int, *, batch_size: int, epochs: int, steps: int | None, last_batch: str) -> int:
    """Local steps of a client with ``size`` samples."""
    if steps is not None:
        return steps
    per_epoch = max(1, size // batch_size) if last_batch == "drop" else ceil(size / batch_size)
    return epochs * per_epoch


def has_single(sizes: np.ndarray, *, batch_size: int, steps: int | None, last_batch: str) -> np.ndarray:
    """Which clients with so many samples have a batch of a single one, bool ``[K]``."""
    short = sizes % batch_size == 1  # at the end of a pass, if it gets there
    if steps is not None:
        short &= sizes <= steps * batch_size
    whole = {"keep": short | (sizes == 1), "drop": sizes == 1, "wrap": np.zeros_like(sizes, dtype=bool)}
    return whole[last_batch] | (batch_size == 1)


def _client_steps(
    samples: np.ndarray, rng: np.random.Generator, *, batch_size: int, epochs: int, steps: int | None, last_batch: str
) -> tuple[np.ndarray, np.ndarray]:
    """Indices ``[T, B]`` and counts ``[T]`` of one client: a new order every epoch, cut into batches."""
    if last_batch == "wrap":  # the GC-Fed authors' code: whole batches, by repeating the first samples
        samples = np.resize(samples, ceil(len(samples) / batch_size) * batch_size)
    cut = partial(number_of_steps, len(samples), batch_size=batch_size, last_batch=last_batch)
    total, per_epoch = cut(epochs=epochs, steps=steps), cut(epochs=1, steps=None)
    rounds = ceil(total / per_epoch)
    order = rng.permuted(np.broadcast_to(samples, (rounds, len(samples))), axis=1)
    slots = np.full((rounds, per_epoch * batch_size), samples[0], dtype=np.int64)
    used = min(len(samples), slots.shape[1])
    slots[:, :used] = order[:, :used]
    counts = np.full(per_epoch, batch_size)
    counts[-1] = used - (per_epoch - 1) * batch_size
    return slots.reshape(-1, batch_size)[:total], np.tile(counts, rounds)[:total]


def plan_batches(
    data: ClientData,
    clients: np.ndarray,
    *,
    seed: int,
    round_index: int,
    batch_size: int,
    to_device: Callable[[np.ndarray], Tensor],
    **passes: Any,
) -> BatchPlan:
    """The plan of K clients, with ``passes`` as :func:`number_of_steps` takes them.

    What a client draws depends on (seed, round, client) alone.
    """
    samples = [data.client(client) for client in clients.tolist()]
    # The plan is dense: no batch needs more room than a million samples, or the largest client where it has more.
    batch_size = min(batch_size, max(1_000_000, *map(len, samples)))
    plans, draws = [], []
    for client, own in zip(clients.tolist(), samples, strict=True):
        shuffle, augment = (generator(seed, purpose, round_index, client) for purpose in ("shuffle", "augment"))
        plans.append(_client_steps(own, shuffle, batch_size=batch_size, **passes))
        draws.append(data.draw(augment, plans[-1][0].shape))
    index, counts = _padded([index for index, _ in plans], -1), _padded([counts for _, counts in plans])
    index = np.where(index < 0, index[:, :1, :1], index)
    return BatchPlan(to_device(index), None if draws[0] is None else to_device(_padded(draws)), counts)


def _padded(arrays: Sequence[Any], value: int = 0) -> np.ndarray:
    """Arrays ``[T_k, …]`` as one, ``[K, T, …]``, with ``value`` where one has ended."""
    return pad_sequence([torch.from_numpy(array) for array in arrays], True, value).numpy()
