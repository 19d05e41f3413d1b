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

import torch

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, per_client
from gcfed.metrics.base import ClientMetric, dot, floats, zeros


class Drift(ClientMetric):
    """Adds ``drift/*`` to the rows of metrics. A stack's clients are summed where they train."""

    name = "drift"

    def zeros(self, round: Round) -> Params:
        """Of Δ_k and Δ_k / ‖Δ_k‖ by parameter; under "" of ‖Δ_k‖, ‖Δ_k‖² and the number of clients."""
        start = self.params(round.start)
        sums = {f"{what} {name}": torch.zeros_like(t) for what in ("update", "direction") for name, t in start.items()}
        return sums | {"": zeros(round, 3)}

    def note(self, stack: ClientStack, download: Download) -> Params:
        start = self.params(download.model)
        # Tensor by tensor, and twice: a second copy of a whole stack may not fit beside the first.
        deltas = ((stack.full[name] - t).reshape(len(stack), -1) for name, t in start.items())
        square_K = torch.stack([delta.square().sum(1, dtype=torch.float64) for delta in deltas]).sum(0)
        finite = square_K.isfinite()
        square_K = square_K.where(finite, 0.0)
        norm_K = square_K.sqrt()
        unit_K = torch.where(norm_K > 0, 1 / norm_K, 0.0)
        note = {"": torch.stack([norm_K.sum(), square_K.sum(), finite.sum()])}
        for name, t in start.items():
            delta = torch.where(per_client(finite, stack.full[name]), stack.full[name] - t, 0.0)
            note[f"update {name}"] = delta.sum(0)
            note[f"direction {name}"] = delta.mul_(per_client(unit_K, delta)).sum(0)
        return note

    def summary(self, sums: Params, round: Round) -> dict[str, float]:
        update, direction = ({n: sums[f"{what} {n}"] for n in self.names} for what in ("update", "direction"))
        norm, square, clients = sums[""]
        start, update_norm = self.params(round.start), dot(update, update).sqrt() / clients
        values = {
            "drift/client_norm": norm / clients,
            "drift/relative": norm / clients / dot(start, start).sqrt(),
            "drift/update_norm": update_norm,
            "drift/divergence": (square / clients - update_norm**2).clamp(min=0).sqrt(),
            "drift/cosine": dot(direction, update) / clients**2 / update_norm,
        }
        return floats(values) if clients else {}
