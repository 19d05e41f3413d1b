"""What arrives at the server, against what it makes of it: angles of the uploads, and the gap to all clients."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload, finite_clients
from gcfed.federated.method import Setup, upload_shapes
from gcfed.federated.round import Round
from gcfed.federated.stack import per_client
from gcfed.metrics.base import ServerMetric, dot, floats, now, zeros
from gcfed.utils.checked import Count, checked


class Angle(ServerMetric):
    """What FedGC's constraints bound (gradient constraint, equations 1 and 8): ``angle/*``.

    With Δ_k the update of client k as it arrives (projected, quantized), Δ̄ the aggregated update of this round, and s
    what the server did in the round before (broadcast now − broadcast then), in degrees over all parameters together:

    ==================  ========================================================================================
    ``angle/server``    mean angle of Δ_k and s; none in the first round
    ``angle/above_90``  share of the clients with an angle above 90°: those that undo some of the round before
    ``angle/update``    angle whose cosine is the clients' mean cosine to Δ̄, ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩ / ‖Δ̄‖
    ==================  ========================================================================================

    Δ̄ is known only when the uploads are gone, so that a sum of unit vectors has to stand for them, and their cosines
    are averaged, not their angles. Where coordinates of a subspace are uploaded, the updates that they stand for are
    measured. Clients whose Δ_k is not finite, and those that did not move, are left out.
    """

    name = "angle"

    def on_broadcast(self, download: Download, round: Round) -> None:
        super().on_broadcast(download, round)
        start = self.params(download.model)
        torch._foreach_copy_(list(self.server_state("broadcast", start).values()), list(start.values()))

    def begin(self, download: Download, round: Round) -> None:
        start = self.params(download.model)
        known = "broadcast" in self._server  # in the first round, and where a run resumes with this metric, it is not
        last = self.server_state("broadcast", start)
        self._step = {name: t - last[name] if known else torch.zeros_like(t) for name, t in start.items()}
        self._step_norm = dot(self._step, self._step).sqrt()
        self._direction = {name: torch.zeros_like(t) for name, t in self._step.items()}  # Σ Δ_k / ‖Δ_k‖
        # Σ angle, clients above 90°, clients with an angle; clients with a direction
        self._sums = zeros(round, 4)
        self._values: dict[str, Tensor] = {}

    def take(self, upload: Upload, round: Round) -> None:
        delta = self.as_sent(upload, self.names)
        norm_K = _dots(delta, delta).sqrt()
        moved = upload.finite & norm_K.isfinite() & (norm_K > 0)
        cosine_K = _dots(delta, self._step) / (norm_K * self._step_norm)
        valid = moved & cosine_K.isfinite()
        angle_K = torch.where(valid, degrees(cosine_K), 0.0)
        self._sums += torch.stack([angle_K.sum(), (valid & (cosine_K < 0)).sum(), valid.sum(), moved.sum()])
        for name, total in self._direction.items():
            unit = delta[name] / per_client(norm_K, delta[name]).to(total.dtype)
            total += torch.where(per_client(moved, unit), unit, 0.0).sum(0)

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        """Metrics come after the methods: this update is the one that they leave for the server's optimizer."""
        if not self.due_in(round):
            return
        *parts, (total, above, count, clients) = round.reduce([*self._direction.values(), self._sums])
        update = {name: update[name] for name in self.names}
        cosine = dot(dict(zip(self.names, parts, strict=True)), update) / (clients * dot(update, update).sqrt())
        self._values = {"server": total / count, "above_90": above / count, "update": degrees(cosine)}

    def columns(self, round: Round) -> dict[str, float]:
        known = floats(self._values) if self._values else {}
        return {f"angle/{name}": value for name, value in known.items() if value == value}


def degrees(cosine: Tensor) -> Tensor:
    """The angle of a cosine, 0 to 180; rounding may have led the cosine out of its range."""
    return cosine.clamp(-1, 1).arccos().rad2deg()


def _dots(tensors_K: Params, other: Params) -> Tensor:
    """⟨a_k, b_k⟩ over all tensors, ``[K, *shape]`` both, or one b for all, ``[*shape]`` → ``[K]``, in float64."""
    products = ((t * other[name]).reshape(len(t), -1) for name, t in tensors_K.items())
    return torch.stack([product.sum(1, dtype=torch.float64) for product in products]).sum(0)


@checked
@dataclass(eq=False)
class Gap(ServerMetric):
    """The gap between the partial update and the true one: ``gap/*``, GC-Fed's Figure 1(b), in three units.

    Of few participants the server averages Δ_S, of all N clients it would have averaged Δ_all. In the rounds that are
    measured the clients outside the cohort train too, from the same broadcast, with the batches that they would have
    drawn and the state of server and clients that they would have met, in a *rehearsal* of which nothing lasts:

    ================  =====================================
    ``gap/l2``        ‖Δ_S − Δ_all‖
    ``gap/relative``  ‖Δ_S − Δ_all‖ / ‖Δ_all‖
    ``gap/cosine``    ⟨Δ_S, Δ_all⟩ / (‖Δ_S‖ ‖Δ_all‖)
    ================  =====================================

    Both are means of what clients upload, weighted as the aggregator weights them, over parameters, before the server
    makes more of them (Global GC, momentum, a table). A measured round costs N/|S| rounds of training: it enters
    ``time/round_s``, but not ``time/train_s``.
    """

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
