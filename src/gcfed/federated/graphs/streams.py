"""CUDA streams, on which stacks train side by side."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

STREAMS = 8  # at most; a GPU has no room for more at once


class Streams:
    """The streams of a GPU, on which the stacks of a round train in turn; on a CPU, nothing.

    Each stack trains on one stream. The hooks after local training and the sums of uploads run on the round's stream,
    one stack after the other, in the host's order. So equal runs have equal numbers, and one stack at a time writes
    client states. The stack's stream waits for them, because the next stack reuses the memory.

    A single stack also gets a stream, because no CUDA graph can be recorded on the default stream.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(number)] if device.type == "cuda" else []
        self._own: torch.cuda.Stream | None = None  # of the round
        self._turn = 0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Encloses the stacks of a round: they wait for earlier work, and later work waits for them."""
        if not self._streams:
            yield
            return
        self._own, self._turn = torch.cuda.current_stream(), 0
        for stream in self._streams:
            stream.wait_stream(self._own)
        try:
            yield
        finally:
            for stream in self._streams:
                self._own.wait_stream(stream)
            self._own = None

    def stack(self) -> AbstractContextManager:
        """Encloses the training of a stack, on the next stream."""
        self._turn += 1
        return torch.cuda.stream(self._streams[self._turn % len(self._streams)]) if self._streams else nullcontext()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within :meth:`stack`, encloses what follows local training; does nothing outside of a round."""
        if self._own is None:
            yield
            return
        trained = torch.cuda.current_stream()
        self._own.wait_stream(trained)
        with torch.cuda.stream(self._own):
            yield
        trained.wait_stream(self._own)
