"""Where one stack trains after another, so that what was recorded of one serves the next.

A recording knows tensors by where they lie in memory. In a place a stack's weights, its optimizer's state, its plan,
its losses and what methods prepare for it lie where those of the stack before it lay; only their values are new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gcfed.federated.batches import BatchPlan
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download
from gcfed.federated.recorder import Losses, Recordings
from gcfed.federated.stack import ClientStack


class Place:
    """The memory of one stack of K clients, on one stream.

    Args:
        stack: the first one, which stays.
        plan: its plan.
        room: steps of the longest plan that may come.
        lr: η_l, a number in what is recorded.
    """

    def __init__(self, stack: ClientStack, plan: BatchPlan, room: int, lr: float) -> None:
        self.stack, self.lr = stack, lr
        self.tables = [table.new_zeros(len(table), room, *table.shape[2:]) for table in plan.tables]
        self.losses = Losses(len(stack), room)
        self.recordings = Recordings(plan.index.device)
        self.optimizer: Optimizer | None = None
        self._state: list[dict[str, object]] = []  # of the optimizer: each parameter's, of all K clients
        self._prepared: dict[int, Params] = {}  # by part

    def suits(self, plan: BatchPlan, lr: float) -> bool:
        """Whether K clients with this plan can train here by what is recorded."""
        alike = all(
            new.shape[2:] == table.shape[2:] and new.shape[1] <= table.shape[1]
            for new, table in zip(plan.tables, self.tables, strict=True)
        )
        return lr == self.lr and alike

    def lay(self, plan: BatchPlan) -> BatchPlan:
        """The plan in this place's memory."""
        for table, new in zip(self.tables, plan.tables, strict=True):
            table[:, : new.shape[1]].copy_(new)
        return plan.on(self.tables)

    def prepare(self, part: object, prepared: Params) -> Params:
        """What a part prepares for these clients, in this place's memory."""
        if prepared is self.stack.start:
            return prepared  # lies here
        kept = self._prepared.get(id(part), {})
        if {name: t.shape for name, t in kept.items()} != {name: t.shape for name, t in prepared.items()}:
            self.recordings.steps.clear()
            kept = self._prepared[id(part)] = {name: t.clone() for name, t in prepared.items()}
        elif kept:
            torch._foreach_copy_(list(kept.values()), [prepared[name] for name in kept])
        return kept

    def keep(self, optimizer: Optimizer) -> None:
        """After the first step of all, which made the optimizer's state."""
        self.optimizer = optimizer
        self._state = [dict(optimizer.state[leaf]) for leaf in self.stack.leaves.values()]

    def rewind(self) -> None:
        """The optimizer, the losses and the number of the step as they are before the first step."""
        self.recordings.number.zero_()
        if self.optimizer is None:
            return
        tensors = [*self.losses.tables, *(t for own in self._state for t in own.values() if isinstance(t, Tensor))]
        torch._foreach_zero_(tensors)
        leaves = list(self.stack.leaves.values())
        self.optimizer.state = defaultdict(dict, zip(leaves, map(dict, self._state), strict=True))
        self.optimizer.param_groups[0]["params"] = leaves


def seat(
    places: dict[int, Place],
    make: Callable[..., ClientStack],
    download: Download,
    clients: np.ndarray,
    num_samples: np.ndarray,
    plan: BatchPlan,
    room: Callable[[], int],
) -> tuple[ClientStack, BatchPlan]:
    """A stack of K clients and its plan in a place; in a new one where there is none that suits.

    Args:
        places: by K; most cohorts make stacks of one size and a rest, so two of them stay.
        make: of the start, the clients, their numbers of samples and of steps: a stack.
        room: steps of the longest plan that may come.
    """
    place = places.pop(len(clients), None)
    if place is None or not place.suits(plan, download.lr):
        for oldest in list(places)[:-1]:
            del places[oldest]
        start = {name: t.clone() for name, t in download.model.items()}
        stack = make(start, clients, num_samples, plan.steps)
        place = stack.place = Place(stack, plan, max(room(), len(plan.kinds)), download.lr)
    else:
        stack = place.stack
        stack.reload(download.model, clients, num_samples, plan.steps)
        place.rewind()
    places[len(clients)] = place
    return stack, place.lay(plan)
