"""Streams of a GPU, on which stacks train side by side."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

STREAMS = 8  # at most: more side by side than a GPU has work for


class Streams:
    """Where the stacks of a round train: in turn on the streams of a GPU, or on a CPU where everything runs.

    A stack trains on a stream of its own. What follows, the methods' hooks and the sums of uploads, runs on the stream
    of the round: there one stack comes after the other in the host's order, so that equal runs have equal numbers and
    one stack at a time writes what a method keeps of all clients. Only a stream itself reuses its memory, and it waits
    for what follows. At the end of a round the round's stream waits for all of them.

    A single stream, too, is not the default one, on which no graph can be recorded.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(number)] if device.type == "cuda" else []
        self._own: torch.cuda.Stream | None = None  # of the round
        self._turn = 0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Around the stacks of a round: they wait for what came before, what comes after waits for them."""
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
        """Around a stack: the next stream."""
        if not self._streams:
            return nullcontext()
        self._turn += 1
        return torch.cuda.stream(self._streams[self._turn % len(self._streams)])

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within :meth:`stack`, around what follows local training; does nothing outside of a round."""
        if self._own is None:
            yield
            return
        trained = torch.cuda.current_stream()
        self._own.wait_stream(trained)
        with torch.cuda.stream(self._own):
            yield
        trained.wait_stream(self._own)
