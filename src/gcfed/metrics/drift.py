"""Client drift: how far local training leads the clients from the global model, and from each other.

With w the broadcast model, w_k what client k makes of it, Δ_k = w_k − w and Δ̄ the plain mean of the Δ_k of the cohort:

======================  ==============================================================================
``drift/client_norm``   mean ‖Δ_k‖
``drift/relative``      mean ‖Δ_k‖ / ‖w‖
``drift/update_norm``   ‖Δ̄‖
``drift/divergence``    (mean ‖Δ_k − Δ̄‖²)^½, from mean ‖Δ_k − Δ̄‖² = mean ‖Δ_k‖² − ‖Δ̄‖²
``drift/cosine``        mean cosine of Δ_k and Δ̄, from mean ⟨Δ_k, Δ̄⟩ / ‖Δ_k‖ = ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩
======================  ==============================================================================

Parameters only; Δ_k as training leaves it, before anything is quantized or projected. Two sums of the model's size
stream over the cohort, whatever its size. Clients whose Δ_k is not finite are left out.
"""

from typing import Any

import torch

from gcfed.federated.messages import Download, Upload
from gcfed.federated.method import ClientPart, Part
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, per_client
from gcfed.metrics.base import Metric, ServerMetric, dot


class Drift(Metric, ClientPart):
    """Adds ``drift/*`` to the rows of metrics. A stack's clients are summed where they train.

    Args:
        every: rounds between two measurements.
    """

    name = "drift"

    @property
    def parts(self) -> tuple[Part, ...]:
        return self, DriftSums(self.every)

    @torch.no_grad()
    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        if not self.due(download.round):
            return
        start = {name: download.model[name] for name in self.names}
        # Tensor by tensor, and twice: a second copy of a whole stack may not fit beside the first.
        deltas = ((stack.full[name] - t).reshape(len(stack), -1) for name, t in start.items())
        square_K = torch.stack([delta.square().sum(1, dtype=torch.float64) for delta in deltas]).sum(0)
        finite = square_K.isfinite()
        square_K = square_K.where(finite, 0.0)
        norm_K = square_K.sqrt()
        unit_K = torch.where(norm_K > 0, 1 / norm_K, 0.0)
        note = stack.notes["drift"] = {"": torch.stack([norm_K.sum(), square_K.sum(), finite.sum()])}
        for name, t in start.items():
            delta = torch.where(per_client(finite, stack.full[name]), stack.full[name] - t, 0.0)
            note[f"update {name}"] = delta.sum(0)
            note[f"direction {name}"] = delta.mul_(per_client(unit_K, delta)).sum(0)


class DriftSums(ServerMetric):
    """Adds up the stacks' sums."""

    name = "drift"

    def on_broadcast(self, download: Download, round: Round) -> None:
        if self.due_in(round):
            self._start = {name: download.model[name] for name in self.names}
            self._update = {name: torch.zeros_like(t) for name, t in self._start.items()}  # Σ Δ_k
            self._direction = {name: torch.zeros_like(t) for name, t in self._start.items()}  # Σ Δ_k / ‖Δ_k‖
            device = self._start[self.names[0]].device
            self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # Σ ‖Δ_k‖, Σ ‖Δ_k‖², clients

    def on_receive(self, upload: Upload, round: Round) -> None:
        if note := upload.notes.get("drift"):
            self._sums += note[""]
            for name in self.names:
                self._update[name] += note[f"update {name}"]
                self._direction[name] += note[f"direction {name}"]

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if not self.due_in(round):
            return
        n = len(self.names)
        sums = round.reduce([*self._update.values(), *self._direction.values(), self._sums])
        update, direction = (dict(zip(self.names, part, strict=True)) for part in (sums[:n], sums[n:-1]))
        (norm, square, clients), start = sums[-1], dot(self._start, self._start).sqrt()
        update_norm = dot(update, update).sqrt() / clients
        values = {
            "client_norm": norm / clients,
            "relative": norm / clients / start,
            "update_norm": update_norm,
            "divergence": (square / clients - update_norm**2).clamp(min=0).sqrt(),
            "cosine": dot(direction, update) / clients**2 / update_norm,
        }
        if clients:
            numbers = torch.stack(list(values.values())).tolist()
            row |= {f"drift/{name}": number for name, number in zip(values, numbers, strict=True)}
        del self._start, self._update, self._direction
