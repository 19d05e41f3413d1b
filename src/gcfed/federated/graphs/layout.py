"""How the stacks of a round use the device: their size, and CUDA streams, on which they train side by side."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle

import torch

STREAMS = 8  # at most; a GPU has no room for more at once


class Layout:
    """K clients in a stack, and the streams of a GPU, on which the stacks of a round train in turn; on a CPU, none.

    Each stack trains on one stream. The hooks after local training and the sums of uploads run on the round's stream,
    one stack after the other, in the host's order. So equal runs have equal numbers, and one stack at a time writes
    client states. The stack's stream waits for them, because the next stack reuses the memory.

    A single stack also gets a stream, because no CUDA graph can be recorded on the default stream.
    """

    def __init__(self, k: int, device: torch.device, streams: int) -> None:
        self.k = k
        self.streams = [torch.cuda.Stream(device) for _ in range(streams)] if device.type == "cuda" else []

    def begin_round(self) -> None:
        """The present stream becomes the round's. The stacks wait for its earlier work."""
        self._turns = cycle(self.streams)
        if self.streams:
            self._round = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(self._round)

    def stack(self) -> AbstractContextManager:
        """Encloses a stack, on the next stream. The last that it does must be :meth:`in_turn`."""
        return torch.cuda.stream(next(self._turns)) if self.streams else nullcontext()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within :meth:`stack`, encloses what follows local training, on the round's stream."""
        if not self.streams:
            yield
            return
        trained = torch.cuda.current_stream()
        self._round.wait_stream(trained)
        with torch.cuda.stream(self._round):
            yield
        trained.wait_stream(self._round)
