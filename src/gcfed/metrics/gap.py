"""The gap between the partial update and the true one: GC-Fed's Figure 1(b).

Of few participants the server averages Δ_S, of all N clients it would have averaged Δ_all. In the rounds that are
measured the clients outside the cohort train too, from the same broadcast, with the batches that they would have drawn
and the state of server and clients that they would have met, in a *rehearsal* of which nothing lasts:

================  =====================================
``gap/l2``        ‖Δ_S − Δ_all‖
``gap/relative``  ‖Δ_S − Δ_all‖ / ‖Δ_all‖
``gap/cosine``    ⟨Δ_S, Δ_all⟩ / (‖Δ_S‖ ‖Δ_all‖)
================  =====================================

The figure's axis has no unit in the paper, so all three are here. Both updates are means of what clients upload,
weighted as the aggregator weights them, over parameters, before the server makes more of them (Global GC, momentum, a
table). A measured round costs N/|S| rounds of training: it enters ``time/round_s``, but not ``time/train_s``.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gcfed.federated.aggregate import MeanAggregator, Upload, finite_clients
from gcfed.federated.loop import FederatedLoop
from gcfed.federated.method import Setup, upload_shapes
from gcfed.federated.round import Round
from gcfed.metrics.base import Metric, dot, now


class Gap(Metric):
    """Adds ``gap/*`` to the rows of metrics.

    Args:
        every: rounds between two measurements.
    """

    name = "gap"

    def __init__(self, every: int = 10) -> None:
        super().__init__(every)
        self._rehearsal: Round | None = None

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.module = setup.module
        weighting = getattr(setup.aggregator, "weighting", "uniform")
        self.partial, self.full = MeanAggregator(weighting), MeanAggregator(weighting)

    def on_broadcast(self, round: Round) -> None:
        """Metrics come after the methods, so what goes down is final, and what methods keep is still this round's."""
        if not self.due(round):
            return
        trainer, device = self.module.trainer, self.module.device
        started = now(device)
        loop = FederatedLoop.of(trainer)
        self._rehearsal = replace(round, rehearsal=True)
        others = np.setdiff1d(np.arange(round.num_clients), round.cohort)
        self.module.net.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for clients in loop.stacks(trainer, others):
                loop.train_clients(trainer, self.module, clients, self._rehearsal)
        self._rehearsal = None
        now(device)  # waits for the device
        trainer.strategy.barrier()  # or the wait for a slower process would count as training
        self._seconds = now(device) - started

    def on_upload(self, upload: Upload, round: Round) -> None:
        rehearsed = round is self._rehearsal
        if rehearsed or self.due(round):
            delta = {name: upload.delta[name] for name in self.names}
            seen = replace(upload, delta=delta, finite=upload.finite & finite_clients(delta))
            self.full.add(seen, round)
            if not rehearsed:
                self.partial.add(seen, round)

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if not self.due(round):
            return
        row["time/train_s"] -= self._seconds
        shapes = upload_shapes(self.methods, round)["delta"]
        like = {name: shapes[name] for name in self.names}
        partial, full = self.partial.reduce(round, like), self.full.reduce(round, like)
        if round.num_finite:
            apart = {name: t - full[name] for name, t in partial.items()}
            squares = [dot(apart, apart), dot(full, full), dot(partial, partial)]
            gap, true, part = torch.stack(squares).sqrt()
            values = torch.stack([gap, gap / true, dot(partial, full) / (true * part)]).tolist()
            row |= dict(zip(("gap/l2", "gap/relative", "gap/cosine"), values, strict=True))
