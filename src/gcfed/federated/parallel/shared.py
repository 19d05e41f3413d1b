"""Sums of forked processes in memory that they share.

torch's gloo would send them over the loopback interface. For the 1.3 MB of a small model its
threads and copies take several milliseconds of processor time.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

SLOT = 1 << 21  # bytes that a process adds at a time, few enough for a core's cache
ALIGNMENT = 16  # bytes; of a complex128, the largest number
PATIENCE_MS = 1000  # time between two checks that the other processes live

Pair = tuple[Tensor, Tensor]  # a process's own numbers, and the memory of their sum; [n] each


class SharedSums:
    """Adds up tensors of the processes of one run. It is made before the others fork.

    Each process copies its numbers into a slot of its own. Then each one adds up a share of the
    entries, and all copy the result. There are two sets of slots, used in turn, so a process may
    begin with the next numbers while another one still copies.

    Args:
        num_processes: their number. The calling process is one of them, and has rank 0.
        are_alive: whether the other processes live. Called in rank 0, while it waits.

    Attributes:
        present: the object of the present run, on each of its processes; None if it has none.
        rank: rank of this process; a fork sets its own.
    """

    present: ClassVar[SharedSums | None] = None

    def __init__(self, num_processes: int, are_alive: Callable[[], bool]) -> None:
        self.rank = 0
        self._num_processes = num_processes
        self._are_alive = are_alive
        memory = mmap.mmap(-1, 2 * num_processes * SLOT)  # shared with forks
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = flat.view(2, num_processes, SLOT)
        self._set = 0  # the present one of the two sets
        # Each process waits at its own door, and the others knock.
        self._doors = [os.eventfd(0) for _ in range(num_processes)]
        self._knocks = 0  # knocks that were heard and are not used yet

    def close(self) -> None:
        for door in self._doors:
            os.close(door)

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all processes (integers modulo 2⁶⁴), in new memory.

        All processes give tensors of the same shapes and types.
        """
        pairs = []
        for t in tensors:
            own = t.detach().reshape(-1)
            pairs.append((own, torch.empty_like(own)))
        for portion in _portions(pairs):
            self._add(portion)
        totals = []
        for t, (_, total) in zip(tensors, pairs, strict=True):
            totals.append(total.view(t.shape))
        return totals

    def _add(self, portion: Sequence[Pair]) -> None:
        """Adds up numbers that fit together into a slot."""
        self._set = 1 - self._set
        slots = self._slots[self._set]
        numbers = []  # the numbers of all processes, [P, n] for each pair
        first = 0
        for own, _ in portion:
            rows = slots[:, first : first + own.nbytes].view(own.dtype)
            rows[self.rank].copy_(own)
            numbers.append(rows)
            first += _aligned(own.nbytes)
        self.wait_for_all()
        for rows in numbers:
            size = rows.shape[1]
            start = size * self.rank // self._num_processes
            stop = size * (self.rank + 1) // self._num_processes
            total, *others = rows[:, start:stop]
            for other in others:
                total.add_(other)
        self.wait_for_all()
        for rows, (_, total) in zip(numbers, portion, strict=True):
            total.copy_(rows[0])

    def wait_for_all(self) -> None:
        """Waits until all processes have called this method as often.

        Raises RuntimeError in rank 0 if another process has ended, as torch does. The launcher
        then ends the others.
        """
        for rank, door in enumerate(self._doors):
            if rank != self.rank:
                os.eventfd_write(door, 1)
        others = self._num_processes - 1
        # A process that is ahead may have knocked once more instead of one that is still knocking.
        while self._knocks < others:
            self._knocks += self._listen()
        self._knocks -= others

    def _listen(self) -> int:
        """Waits for a knock. Returns the number of new ones."""
        door = self._doors[self.rank]
        while not _is_readable(door):
            if self.rank == 0 and not self._are_alive():
                raise RuntimeError("another process of this run has ended")
        return os.eventfd_read(door)


def _is_readable(descriptor: int) -> bool:
    """Waits until something can be read, at most ``PATIENCE_MS``."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(PATIENCE_MS))


def _portions(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yields pieces of these tensors, in groups that fit into a slot."""
    portion: list[Pair] = []
    free = SLOT
    for own, total in pairs:
        width = SLOT // own.itemsize
        for piece in zip(own.split(width), total.split(width), strict=True):
            size = _aligned(piece[0].nbytes)
            if size > free:
                yield portion
                portion = []
                free = SLOT
            portion.append(piece)
            free -= size
    if portion:
        yield portion


def _aligned(size: int) -> int:
    """A number of bytes, rounded up so that a number of any type may follow."""
    return -(-size // ALIGNMENT) * ALIGNMENT
