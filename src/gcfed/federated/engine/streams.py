"""How the stacks of a round share a GPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from math import ceil

import torch

MAX_STREAMS = 8  # a GPU runs as many at once


def divide(cohort: int, room: int, alone: bool, chosen: int | None = None) -> tuple[int, int]:
    """K and the number of streams of a GPU.

    Args:
        room: how many clients' memory is free.
        alone: whether clients train one at a time, unless the user has ``chosen`` a K.
    """
    room = max(1, min(cohort, room))
    k = chosen or (1 if alone else room)
    num_stacks = ceil(cohort / k)
    return k, max(1, min(num_stacks, room // k, MAX_STREAMS))


class Layout:
    """K clients in a stack, and the streams of a GPU, on which the stacks of a round train in turn;
    on a CPU, none.

    Each stack trains on one stream. The hooks after local training and the sums of uploads run on
    the round's stream, in the host's order, so equal runs have equal numbers. The stack's stream
    waits for them, because the next stack reuses the memory. A single stack also has a stream: no
    CUDA graph can be recorded on the default one.
    """

    def __init__(self, k: int, device: torch.device, num_streams: int) -> None:
        self.k = k
        self.streams = [torch.cuda.Stream(device) for _ in range(num_streams)]

    def begin_round(self) -> None:
        """The present stream becomes the round's. The stacks wait for its earlier work."""
        self._turns = cycle(self.streams)
        if self.streams:
            self._round = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(self._round)

    def stack(self) -> AbstractContextManager[None]:
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
