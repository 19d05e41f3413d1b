"""Sums that depend neither on the order of their terms nor on the process that adds them, except
for the last bits of sums in float64.

A term is rounded to a multiple of 2⁻ᵇ, and integers add up to the same sum in any order. The low
bits of the double ``1.5·2⁵² + p x 2ᵇ`` are the integer. |p x| must be less than 2^(51−b), and the
sum of all terms less than 2^(63−b).

Terms of 2^(51−b) and more give their multiples of 2¹⁰ to a coarse grid, and only the remainder to
the first one. On a CPU, the first such term makes the coarse grid.
:func:`~gcfed.federated.protocol.checks.finite_clients` leaves out a client with numbers of
``LIMIT`` or more, which no grid can hold.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gcfed.federated.parallel.shared import SharedSums
from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.utils.bounds import is_below
from gcfed.utils.device import device_of

# b, the number of binary digits after the point, of each grid
NARROW = (40,)  # for updates of trained parameters: multiples of 2⁻⁴⁰, for entries below 2¹¹
WIDE = (10, 60)  # for others below 2⁴¹: the second grid takes the remainder of the first
COARSE = -10  # for numbers from 2⁴¹ to 2⁶¹
LIMIT = 2.0 ** (51 - COARSE)
TERMS = 12  # bits of the number of terms, each with a weight of at most 1
MAGIC = 1.5 * 2.0**52
OFFSET = 0x4338000000000000  # the bits of MAGIC
PIECE = 1 << 18  # entries at a time on a CPU, few enough for a core's cache


class Sums:
    """Σ_k p_k x_k of a set of tensors.

    Tensors in float64 are added as they are, all others on a grid.

    Args:
        like: name → ``[*shape]``; gives shapes, types and the device.
        narrow: names of the tensors whose terms are below 2¹¹.
    """

    def __init__(self, like: Mapping[str, Tensor], narrow: Collection[str] = ()) -> None:
        self._dtypes = {name: t.dtype for name, t in like.items()}
        kinds: dict[tuple[int, ...], dict[str, Tensor]] = defaultdict(dict)
        for name in sorted(like):  # the same order on every process
            digits: tuple[int, ...] = NARROW if name in narrow else WIDE
            if like[name].dtype is torch.float64:
                digits = ()  # added as they are
            kinds[digits][name] = like[name]
        self._grids = [Grid(tensors, digits) for digits, tensors in kinds.items()]
        self._weight = next(iter(like.values())).new_zeros((), dtype=torch.float64)

    def add(self, values_K: Mapping[str, Tensor], weight_K: Tensor) -> None:
        """Adds K terms, name → ``[K, *shape]``, with float64 weights ``[K]`` ≤ 1.

        Weight 0 also leaves out NaN.
        """
        self._weight = self._weight + weight_K.sum()
        for grid in self._grids:
            grid.add(values_K, weight_K)

    def total(self) -> tuple[dict[str, Tensor], Tensor]:
        """The sums over all processes, in float64, name → ``[*shape]``, and the sum of the weights.

        Called once.
        """
        addends = [grid.addends() for grid in self._grids]
        # one exchange, because each one waits for the slowest process
        weight, *reduced = sum_over_processes([self._weight, *chain.from_iterable(addends)])
        remaining = iter(reduced)
        totals: dict[str, Tensor] = {}
        for grid, own in zip(self._grids, addends, strict=True):
            totals |= grid.total([next(remaining) for _ in own])
        return totals, weight

    def mean(self) -> dict[str, Tensor]:
        """The weighted means over all processes, in the types of ``like``; 0 if all weights are 0.

        Called once.
        """
        total, weight = self.total()
        torch._foreach_div_(list(total.values()), torch.where(weight > 0, weight, 1.0))
        return {name: total[name].to(dtype) for name, dtype in self._dtypes.items()}


class Segment(NamedTuple):
    """Entries of a tensor that lie together in a piece of a sum."""

    name: str
    entries: slice | None  # the entries, counted in the order of memory; None: all
    room: Tensor  # their place in the buffer


class Grid:
    """The sums of a set of tensors on grids; ``digits`` is ``NARROW`` or ``WIDE``. Without digits
    they are plain sums.
    """

    def __init__(self, like: Mapping[str, Tensor], digits: Sequence[int]) -> None:
        self.digits = tuple(digits)
        device = device_of(like)
        # Shapes only: a tensor of ``like`` may belong to an upload.
        self._shapes = {name: (t.shape, torch.empty_like(t).stride()) for name, t in like.items()}
        self._sizes = [t.numel() for t in like.values()]
        size = sum(self._sizes)
        dtype = torch.int64 if digits else torch.float64
        self.totals = [torch.zeros(size, dtype=dtype, device=device) for _ in digits or (0,)]
        # A CPU adds a piece at a time, and needs memory for one only.
        self._width = max(1, min(size, PIECE)) if device.type == "cpu" else max(1, size)
        self._buffer = torch.empty(min(size, self._width), dtype=torch.float64, device=device)
        self._pieces = self._cut()
        self._terms = 0
        self._magic = torch.full((1,), MAGIC, dtype=torch.float64, device=device)
        # Terms below it need no coarse grid.
        self._small = 2.0 ** (51 - self.digits[0]) if digits else inf
        self._coarse: Tensor | None = None  # int64, of all entries, in units of 2¹⁰

    def _split(self, flat: Tensor) -> list[Tensor]:
        """All entries, ``[D]``, as tensors in the set's memory formats."""
        pieces = zip(flat.split(self._sizes), self._shapes.values(), strict=True)
        return [piece.as_strided(*layout, piece.storage_offset()) for piece, layout in pieces]

    def _cut(self) -> list[list[Segment]]:
        """Which entries of which tensors lie in each piece of the sum."""
        num_pieces = ceil(sum(self._sizes) / self._width)
        pieces: list[list[Segment]] = [[] for _ in range(num_pieces)]
        first = 0  # the tensor's place in the sum
        for (name, layout), size in zip(self._shapes.items(), self._sizes, strict=True):
            for number in range(first // self._width, ceil((first + size) / self._width)):
                origin = number * self._width
                start = max(first, origin)
                stop = min(first + size, origin + self._width)
                room = self._buffer[start - origin : stop - origin]
                if stop - start == size:
                    whole = room.as_strided(*layout, room.storage_offset())
                    pieces[number].append(Segment(name, None, whole))
                else:
                    pieces[number].append(Segment(name, slice(start - first, stop - first), room))
            first += size
        return pieces

    def add(self, values_K: Mapping[str, Tensor], weight_K: Tensor) -> None:
        if weight_K.device.type == "cpu":
            self._add_on_cpu(values_K, weight_K)
        else:
            self._add_on_gpu(values_K, weight_K)

    def _add_on_cpu(self, values_K: Mapping[str, Tensor], weight_K: Tensor) -> None:
        for row, weight in enumerate(weight_K.tolist()):
            if weight == 0:
                continue
            for start, piece, totals in self._filled(values_K, row):
                if self._has_large(piece):
                    piece.mul_(weight)
                    self._move_large(piece, start)
                    self._add(piece, totals, 1.0)
                else:
                    self._add(piece, totals, weight)

    def _add_on_gpu(self, values_K: Mapping[str, Tensor], weight_K: Tensor) -> None:
        """Adds terms without a look at weights and terms, which would wait for the device."""
        for row, weight in enumerate(weight_K):
            for start, piece, totals in self._filled(values_K, row):
                piece.mul_(weight).masked_fill_(weight == 0, 0.0)
                if self.digits:
                    self._move_large(piece, start)
                self._add(piece, totals, 1.0)

    def _filled(
        self, values_K: Mapping[str, Tensor], row: int
    ) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
        """Copies a client's entries into the buffer, a piece at a time. Yields the place of the
        piece, the piece, and its totals.
        """
        self._terms += 1
        for number, segments in enumerate(self._pieces):
            sources = []
            for segment in segments:
                t = values_K[segment.name][row]
                if segment.entries is not None:
                    _, strides = self._shapes[segment.name]
                    t = _flat(t, strides)[segment.entries]
                sources.append(t)
            torch._foreach_copy_([segment.room for segment in segments], sources)
            start = number * self._width
            totals = [total[start : start + self._width] for total in self.totals]
            yield start, self._buffer[: len(totals[0])], totals

    def _has_large(self, piece: Tensor) -> bool:
        """Whether a number of a piece needs the coarse grid. Weights are at most 1."""
        if not self.digits or not len(piece):
            return False
        return not is_below(piece, self._small)

    def _move_large(self, piece: Tensor, start: int) -> None:
        """Moves the multiples of 2¹⁰ of large numbers from a piece, which begins at the entry
        ``start``, to the coarse grid.
        """
        if self._coarse is None:
            self._coarse = torch.zeros_like(self.totals[0])
        multiples = (piece * 2.0**COARSE).round_()
        multiples.masked_fill_(piece.abs() < self._small, 0.0)
        self._coarse[start : start + len(piece)] += multiples.to(torch.int64)
        piece.sub_(multiples, alpha=2.0**-COARSE)

    def _add(self, piece: Tensor, totals: Sequence[Tensor], weight: float) -> None:
        """Adds a piece of one term, and overwrites the piece."""
        if not self.digits:
            totals[0].add_(piece, alpha=weight)
        for i, b in enumerate(self.digits):
            last = i == len(self.digits) - 1
            term = torch.add(self._magic, piece, alpha=weight * 2.0**b, out=piece if last else None)
            if term.device.type == "cpu":
                # torch would first multiply each integer by 1, which takes as long as the sum.
                total = totals[i].numpy()
                np.add(total, term.view(torch.int64).numpy(), out=total)
            else:
                totals[i].add_(term.view(torch.int64))
            if not last:
                piece.mul_(weight).sub_(term.sub_(self._magic), alpha=2.0**-b)
                weight = 1.0

    def addends(self) -> list[Tensor]:
        """What the processes add up. Called once, after the last term."""
        if not self.digits:
            return self.totals
        offset = (self._terms * OFFSET + 2**63) % 2**64 - 2**63  # as int64
        has_coarse = self._magic.new_tensor([self._coarse is not None], dtype=torch.int64)
        return [*(total.sub_(offset) for total in self.totals), has_coarse]

    def total(self, reduced: Sequence[Tensor]) -> dict[str, Tensor]:
        """The sums over all processes, in float64, name → ``[*shape]``, from those of
        :meth:`addends`, which it overwrites.
        """
        if not self.digits:
            (total,) = reduced
            return self._by_name(total)
        *totals, has_coarse = reduced
        digits = list(self.digits)
        # On a GPU every process has a coarse grid, and a look at it would wait for the device.
        if has_coarse.device.type != "cpu" or int(has_coarse):
            coarse = torch.zeros_like(totals[0]) if self._coarse is None else self._coarse
            totals += sum_over_processes([coarse])
            digits.append(COARSE)
        sums = [self._to_floats(total, b) for total, b in zip(totals, digits, strict=True)]
        for other in sums[1:]:
            sums[0].add_(other)
        return self._by_name(sums[0])

    def _to_floats(self, multiples: Tensor, b: int) -> Tensor:
        """Turns integers, multiples of 2⁻ᵇ, into float64 in the same memory, ``[D]``."""
        for piece in multiples.split(self._width):
            piece.view(torch.float64).copy_(piece.double().mul_(2.0**-b))
        return multiples.view(torch.float64)

    def _by_name(self, total: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._shapes, self._split(total), strict=True))


def _flat(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """All entries, ``[D]``, in the order that memory with these strides has."""
    if t.stride() != strides:
        t = torch.empty_strided(t.shape, strides, dtype=t.dtype).copy_(t)
    return t.as_strided((t.numel(),), (1,))


def sum_over_processes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sums over all processes (int64 modulo 2⁶⁴); the identity in a single process."""
    _, world = rank_and_world()
    if world == 1:
        return tensors
    shared = SharedSums.present
    totals = _sent_sums(tensors) if shared is None else shared.add(tensors)
    return [_in_order_of(t, total) for t, total in zip(tensors, totals, strict=True)]


def _sent_sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums of processes that share no memory: one message for each data type."""
    # The order of the types is the same on every process.
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, t in enumerate(tensors):
        by_dtype[t.dtype].append(i)
    totals = list(tensors)
    for indices in by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in indices])
        _wait(dist.all_reduce(flat, async_op=True), flat)
        sizes = [tensors[i].numel() for i in indices]
        for i, piece in zip(indices, flat.split(sizes), strict=True):
            totals[i] = piece.view(tensors[i].shape)
    return totals


def _in_order_of(t: Tensor, total: Tensor) -> Tensor:
    """A sum in the memory format of its terms, because the server's optimizer needs one layout."""
    if total.stride() == t.stride():
        return total
    return torch.empty_like(t).copy_(total)


def _wait(work: Any, tensor: Tensor) -> None:
    pause = 2e-5  # seconds
    while tensor.device.type == "cpu" and not work.is_completed():
        time.sleep(pause)  # in Python, so that Ctrl-C and SIGTERM interrupt it
        pause = min(1.2 * pause, 5e-4)
    work.wait()
