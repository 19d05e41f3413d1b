"""Angles of what the clients upload: what FedGC's constraints bound (gradient constraint, equations 1 and 8).

With Δ_k the update of client k as it arrives (projected, quantized), Δ̄ the aggregated update of this round, and s what
the server did in the round before (broadcast now − broadcast then), in degrees and over all parameters together:

==================  ==========================================================================================
``angle/server``    mean angle of Δ_k and s; none in the first round
``angle/above_90``  share of the clients with an angle above 90°: those that undo some of the round before
``angle/update``    angle of Δ_k and Δ̄: the one whose cosine is the clients' mean cosine, ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩ / ‖Δ̄‖
==================  ==========================================================================================

Δ̄ is known only when the uploads are gone, so that a sum of unit vectors has to stand for them, and their cosines are
averaged, not their angles. Where coordinates of a subspace are uploaded, the updates that they stand for are measured.
State: the last broadcast, on the server. Clients whose Δ_k is not finite, and those that did not move, are left out.
"""

import torch
from torch import Tensor

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.round import Round
from gcfed.federated.stack import per_client
from gcfed.metrics.base import ServerMetric, dot, floats, zeros


class Angle(ServerMetric):
    """Adds ``angle/*`` to the rows of metrics."""

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
        *parts, sums = round.reduce([*self._direction.values(), self._sums])
        total, above, count, clients = sums
        update = {name: update[name] for name in self.names}
        norm = dot(update, update).sqrt()
        cosine = dot(dict(zip(self.names, parts, strict=True)), update) / (clients * norm)
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
