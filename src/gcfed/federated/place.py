"""Where one stack trains after another, so that what was recorded of one serves the next.

A recording knows tensors by where they lie in memory. In a place a stack's weights, its optimizer's state, its plan,
its losses and what methods prepare for it lie where those of the stack before it lay; only their values are new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

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
    """The memory of stacks of K clients, on one stream.

    Args:
        stack: the first one, on a start of its own.
        optimizer: of its leaves.
        plan: its plan.
        room: steps of the longest plan that may come.
        lr: η_l of its round.

    Attributes:
        stack, optimizer, losses, recordings: of the clients that train here at present.
    """

    def __init__(self, stack: ClientStack, optimizer: Optimizer, plan: BatchPlan, room: int, lr: float) -> None:
        self.stack, self.optimizer, self.lr = stack, optimizer, lr
        self.stack.stays = True
        self.losses, self.recordings = Losses(len(stack), room), Recordings(plan.index.device)
        self._tables = [table.new_zeros(len(table), room, *table.shape[2:]) for table in plan.tables]
        self._state: list[dict[str, object]] = []  # of the optimizer: each parameter's, of all K clients
        self._prepared: dict[int, Params] = {}  # by part

    def suits(self, plan: BatchPlan) -> bool:
        """Whether this plan fits in."""
        return all(
            new.shape[2:] == table.shape[2:] and new.shape[1] <= table.shape[1]
            for new, table in zip(plan.tables, self._tables, strict=True)
        )

    def take(self, download: Download, clients: np.ndarray, num_samples: np.ndarray, plan: BatchPlan) -> None:
        """The next K clients: before their first step all is as it was before the first one's."""
        self.stack.reload(download.model, clients, num_samples, plan.steps)
        if download.lr != self.lr:  # a number in what is recorded
            self.lr = download.lr
            self.recordings.steps.clear()
        tensors = [*self.losses.tables, *(t for own in self._state for t in own.values() if isinstance(t, Tensor))]
        torch._foreach_zero_([self.recordings.number, *tensors])
        leaves = list(self.stack.leaves.values())
        self.optimizer.state = defaultdict(dict, zip(leaves, map(dict, self._state), strict=True))
        self.optimizer.param_groups[0]["params"] = leaves

    def lay(self, plan: BatchPlan) -> BatchPlan:
        """The plan in this place's memory."""
        for table, new in zip(self._tables, plan.tables, strict=True):
            table[:, : new.shape[1]].copy_(new)
        return plan.on(self._tables)

    def prepare(self, part: object, prepared: Mapping[str, Tensor]) -> Params:
        """What a part prepares for these clients, in this place's memory."""
        kept = self._prepared.get(id(part), {})
        if {name: t.shape for name, t in kept.items()} != {name: t.shape for name, t in prepared.items()}:
            self.recordings.steps.clear()
            kept = self._prepared[id(part)] = {name: t.clone() for name, t in prepared.items()}
        elif kept:
            torch._foreach_copy_(list(kept.values()), [prepared[name] for name in kept])
        return kept

    def stepped(self) -> None:
        """After a first step: that of all has made the optimizer's state, of all K clients."""
        if not self._state:
            self._state = [dict(self.optimizer.state[leaf]) for leaf in self.stack.leaves.values()]
