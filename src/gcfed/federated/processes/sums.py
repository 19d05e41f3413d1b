"""Sums over the processes of a run, once a round."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.functional import pad

from gcfed.federated.processes.strategy import rank_and_world

Combine = Callable[[Sequence[Tensor]], Tensor]
SMALL = 1 << 18
"""Entries of sums that travel whole, in one message, which takes less time than two of fewer bytes."""
BLOCK = 1 << 20
"""Entries that are on their way at once: what they need beside the model stays small."""


def sum_over_processes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sums tensors over all processes, one message for each data type; the identity in a single process."""
    if rank_and_world()[1] == 1:
        return tensors
    result: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # in the same order on every process
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        flat = _flatten_dense_tensors([tensors[i].contiguous() for i in places])
        _wait(dist.all_reduce(flat, async_op=True), flat)
        parts = _unflatten_dense_tensors(flat, [tensors[i].contiguous() for i in places])
        for i, part in zip(places, parts, strict=True):
            # Memory format of the original, so that the server's optimizer meets one layout.
            result[i] = torch.empty_like(tensors[i]).copy_(part)
    return result


def finish_over_processes(
    sums: Sequence[Sequence[Tensor]], finish: Callable[..., Combine], *more: Tensor
) -> list[Tensor]:
    """``finish(*more)(parts)`` of each sum, once its parts, and ``more``, are added up over all processes.

    Each process adds up and finishes its share of the entries, and what comes of it goes to all: of two processes each
    sends half of the parts and half of the result, where :func:`sum_over_processes` would send all parts.

    Args:
        sums: each some parts, ``[*shape]``, as many and of one type in all sums.
        finish: called once; what it returns works on entries one by one, parts to one tensor, ``[*shape]``.
        more: few numbers.
    """
    if rank_and_world()[1] == 1:
        return [*map(finish(*more), sums)]
    likes = [parts[0] for parts in sums]
    sizes = [like.numel() for like in likes]
    if sum(sizes) <= SMALL:
        added = iter(sum_over_processes([*(part for parts in sums for part in parts), *more]))
        sums = [[next(added) for _ in parts] for parts in sums]
        return [*map(finish(*added), sums)]
    finish_entries = finish(*sum_over_processes(more))
    flat = [[part.reshape(-1) for part in parts] for parts in sums]
    finished: list[list[Tensor]] = [[] for _ in sums]
    for block in _blocks(sizes):
        pieces_of = ([part[span] for part in flat[i]] for i, span in block)
        parts = [torch.cat(pieces) for pieces in zip(*pieces_of, strict=True)]
        pieces = _finish_share(parts, finish_entries).split([span.stop - span.start for _, span in block])
        for (i, _), piece in zip(block, pieces, strict=True):
            finished[i].append(piece)
    whole = (torch.cat(pieces).view_as(like) for pieces, like in zip(finished, likes, strict=True))
    return [torch.empty_like(like, dtype=t.dtype).copy_(t) for t, like in zip(whole, likes, strict=True)]


def _blocks(sizes: Sequence[int]) -> Iterator[list[tuple[int, slice]]]:
    """All entries of tensors of these sizes, ``BLOCK`` at a time: which tensor, and which of its entries."""
    block: list[tuple[int, slice]] = []
    room = BLOCK
    for i, size in enumerate(sizes):
        start, stop = 0, -1
        while stop < size:  # once also for a tensor without entries
            stop = min(size, start + room)
            block.append((i, slice(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield block
                block, room = [], BLOCK
    if block:
        yield block


def _finish_share(parts: Sequence[Tensor], finish: Combine) -> Tensor:
    """``[n]`` of parts ``[n]``, of which each process finishes as many entries."""
    world, n = rank_and_world()[1], len(parts[0])
    share = -(-n // world)
    sent = parts[0].new_zeros(world, len(parts), share)
    for i, part in enumerate(parts):
        sent[:, i] = pad(part, (0, world * share - n)).view(world, share)
    received = torch.empty_like(sent)
    _wait(dist.all_to_all_single(received, sent, async_op=True), sent)
    mine = finish(list(received.sum(0)))
    whole = mine.new_empty(world * share)
    _wait(dist.all_gather_into_tensor(whole, mine, async_op=True), mine)
    return whole[:n]


def _wait(work: Any, tensor: Tensor) -> None:
    while tensor.device.type == "cpu" and not work.is_completed():
        time.sleep(5e-4)  # in Python, where a Ctrl-C or SIGTERM is heard before the slowest process is done
    work.wait()
