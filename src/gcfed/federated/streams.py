"""Streams of a GPU, on which the stacks of a round train side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Streams:
    """Where the stacks of a round train: in turn on the streams of a GPU, or on a CPU where everything runs.

    What a stack computes stays on its stream, its upload's part in the sums too: those wait for the stack before, so
    that they are made in the host's order and equal runs have equal numbers. The memory of a stream is used again by
    that stream alone; at the end of a round the present stream waits for all of them, before anything is freed.

    Args:
        device: a GPU, or a CPU, which has no streams.
        number: of streams; a single one is not that of everything else, which no graph can be recorded on.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(number)] if device.type == "cuda" else []
        self._last: torch.cuda.Event | None = None
        self._turn = 0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Around the stacks of a round: they wait for what came before, what comes after waits for them."""
        if not self._streams:
            yield
            return
        present = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(present)
        self._last, self._turn = None, 0
        try:
            yield
        finally:
            for stream in self._streams:
                present.wait_stream(stream)

    def stack(self) -> AbstractContextManager:
        """Around the training of one stack: the next stream."""
        if not self._streams:
            return nullcontext()
        self._turn += 1
        return torch.cuda.stream(self._streams[self._turn % len(self._streams)])

    @contextmanager
    def sums(self) -> Iterator[None]:
        """Within :meth:`stack`, around what adds to the round's sums."""
        if self._streams and self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
        yield
        if self._streams:
            self._last = torch.cuda.current_stream().record_event()
