"""How long each client's update is, layer by layer, and how much of it P takes out: ``updates.csv``.

With Δ_k what local training makes of client k's model, a line for each client of a round and each weight tensor:
``norm`` is ‖Δ_k‖ of the tensor and ``removed`` ‖(I − P)Δ_k‖, what gradient centralization takes out of it. Both are
``nan`` or ``inf`` where training was not finite. It shows who explodes, and where.
"""

from pathlib import Path

import torch

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import ClientMetric, Sums, device_of, in_cohort
from gcfed.metrics.cohorts import RoundTable
from gcfed.utils.checked import Count, checked


class UpdatesTable(Sums):
    """Writes them, in the order of the cohort."""

    half: "Updates"

    def zeros(self, download: Download) -> Params:
        self._weights = list(self.params(download, 2))
        shape, device = (len(download.cohort), len(self._weights), 2), device_of(download.model)
        return {"squares": torch.zeros(shape, dtype=torch.float64, device=device)}

    def summary(self, sums: Params, round: Round) -> dict[str, float]:
        lines = (
            (client, name, f"{norm:.6g}", f"{removed:.6g}")
            for client, tensors in zip(round.cohort.tolist(), sums["squares"].sqrt().tolist(), strict=True)
            for name, (norm, removed) in zip(self._weights, tensors, strict=True)
        )
        self.half.table.append(round, lines)
        return {}


class Updates(ClientMetric):
    """Appends ``round,client,tensor,norm,removed`` to ``updates.csv``. Adds nothing to the rows of metrics.

    Args:
        folder: where the file goes.
        every: rounds between two of those that are written.
    """

    name, server = "updates", UpdatesTable

    @checked
    def __init__(self, folder: str, every: Count = 1) -> None:
        super().__init__(every)
        self.table = RoundTable(Path(folder) / "updates.csv", "client", "tensor", "norm", "removed")

    def note(self, stack: ClientStack, download: Download) -> Params:
        squares = []
        for name, start in self.params(download, 2).items():
            delta = (stack.full[name] - start).double().flatten(2)  # [K, out, in]
            norm, removed = delta.square().sum((1, 2)), delta.mean(2).square().sum(1) * delta.shape[2]
            squares.append(torch.stack([norm, removed], 1))
        return {"squares": in_cohort(torch.stack(squares, 1), stack, download)}
