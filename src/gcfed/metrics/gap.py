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

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.messages import Download, Upload, finite_clients
from gcfed.federated.method import Setup, upload_shapes
from gcfed.federated.round import Round
from gcfed.metrics.base import ServerMetric, dot, floats, now
from gcfed.utils.checked import Count, checked


@checked
@dataclass(eq=False)
class Gap(ServerMetric):
    """Adds ``gap/*`` to the rows of metrics."""

    every: Count = 10

    name = "gap"
    rehearses = True

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        weighting: Any = getattr(setup.aggregator, "weighting", "uniform")
        self.partial, self.full = MeanAggregator(weighting), MeanAggregator(weighting)

    def begin(self, download: Download, round: Round) -> None:
        device = self.module.device
        others = np.setdiff1d(np.arange(round.num_clients), round.cohort)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for upload in self.transport.rehearse(download, others):
                self.full.add(self._seen(upload), round)
                del upload  # nothing holds it while the next stack trains
        now(device)  # waits for the device
        self.module.trainer.strategy.barrier()  # or the wait for a slower process would count as training

    def take(self, upload: Upload, round: Round) -> None:
        seen = self._seen(upload)
        self.full.add(seen, round)
        self.partial.add(seen, round)

    def _seen(self, upload: Upload) -> Upload:
        delta = {name: upload.delta[name] for name in self.names}
        return replace(upload, delta=delta, finite=upload.finite & finite_clients(delta))

    def columns(self, round: Round) -> dict[str, float]:
        shapes = upload_shapes(self.server_parts, round)["delta"]
        like = {name: shapes[name] for name in self.names}
        partial, full = self.partial.reduce(round, like), self.full.reduce(round, like)
        if not round.num_finite:
            return {}
        apart = {name: t - full[name] for name, t in partial.items()}
        gap, true, part = torch.stack([dot(apart, apart), dot(full, full), dot(partial, partial)]).sqrt()
        cosine = dot(partial, full) / (true * part)
        return floats({"gap/l2": gap, "gap/relative": gap / true, "gap/cosine": cosine})
