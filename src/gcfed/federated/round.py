"""One communication round, as the hooks of the methods see it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from gcfed.federated.stack import Params, nbytes

Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Sums tensors over all processes, in one message; the identity where there is one process."""


def no_reduce(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What ``Round.reduce`` is in a single process."""
    return tensors


class Order(IntEnum):
    """What a method does to a client's step or upload: the order in which the methods of a run are called.

    What moves the weights comes first, so that the others see them where they were; then terms and corrections of the
    gradient, and GC after them; what projects on a subspace after all of them, since a gradient edited later would
    leave it; attacks on what is ready to be sent; quantization after what it rounds; measurements last.
    """

    MOVES_WEIGHTS = 0
    CORRECTS = 1
    PROJECTS = 2
    ATTACKS = 3
    QUANTIZES = 4
    MEASURES = 5


@dataclass
class Round:
    """What is known of a round on every process.

    Attributes:
        index: number of rounds finished before this one; the first has index 0.
        seed: the run's seed; every draw derives from it.
        cohort: ids of all participating clients, ``[K]``, sorted.
        num_clients: N, the size of the population.
        start: what the server broadcasts, name → ``[*shape]``, a copy that stays as it is when the server has stepped;
            ``on_broadcast`` may replace tensors, never edit them.
        lr: η_l, the clients' learning rate in this round.
        reduce: sums tensors over the processes; every process must call it, so never from a hook of a stack.
        server: the server's optimizer, whose momentum a method may send ahead; None in a loop without one.
        down_bytes: sent to all clients of the round; :meth:`send` adds to it.
        samples, steps: that this process has trained on so far, a sample in each of its epochs, and local steps.
        num_finite: clients whose updates were finite; known from ``on_aggregate_end`` on.
        received: what clients sent beside Δ, by the name given to ``Upload.send``: the mean over the finite clients, or
            what another aggregator makes of them, name → ``[*shape]``; known from ``on_aggregate_end`` on.
        lost: clients that got the broadcast and did not come back: they are not in the cohort.
        rehearsal: this round only measures what clients would do: nothing of it may last.
    """

    index: int
    seed: int
    cohort: np.ndarray
    num_clients: int
    start: Params
    lr: float
    reduce: Reduce = no_reduce
    server: Optimizer | None = None
    down_bytes: int = 0
    samples: int = 0
    steps: int = 0
    num_finite: int = 0
    received: dict[str, Params] = field(default_factory=dict)
    lost: int = 0
    rehearsal: bool = False

    @property
    def receivers(self) -> int:
        """Number of clients that the server sends to."""
        return len(self.cohort) + self.lost

    def places(self, clients: np.ndarray) -> list[int]:
        """Where these clients, ``[K]``, stand in the cohort."""
        place = {client: i for i, client in enumerate(self.cohort.tolist())}
        return [place[client] for client in clients.tolist()]

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Counts the bytes of what the server sends to every client beside the model."""
        self.down_bytes += self.receivers * nbytes(tensors)


def assign(cohort: np.ndarray, work: np.ndarray, rank: int, world: int) -> np.ndarray:
    """The clients of ``cohort`` that process ``rank`` of ``world`` trains, most work first.

    Largest first, each to the process with the least work so far; every process computes the same assignment.
    """
    load, mine = np.zeros(world), []
    for i in np.lexsort((cohort, -work)):
        target = int(load.argmin())
        load[target] += work[i]
        if target == rank:
            mine.append(i)
    return cohort[np.array(mine, dtype=np.int64)]
