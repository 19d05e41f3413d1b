"""One communication round, as the hooks of the methods see it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gcfed.federated.stack import Params

Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Sums tensors over all processes, in one message; the identity where there is one process."""


def no_reduce(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What ``Round.reduce`` is in a single process."""
    return tensors


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
        reduce: sums tensors over the processes; every process must call it, so never from a hook of a stack.
        down_bytes: sent to the whole cohort; methods add what they send beside the model.
        num_finite: clients whose updates were finite; known from ``on_aggregate_end`` on.
    """

    index: int
    seed: int
    cohort: np.ndarray
    num_clients: int
    start: Params
    reduce: Reduce = no_reduce
    down_bytes: int = 0
    num_finite: int = 0


def deal(cohort: np.ndarray, work: np.ndarray, rank: int, world: int) -> np.ndarray:
    """The clients of ``cohort`` that process ``rank`` of ``world`` trains, most work first.

    Largest first, each to the process with the least work so far; every process computes the same deal.
    """
    load, mine = np.zeros(world), []
    for i in np.lexsort((cohort, -work)):
        target = int(load.argmin())
        load[target] += work[i]
        if target == rank:
            mine.append(i)
    return cohort[np.array(mine, dtype=np.int64)]
