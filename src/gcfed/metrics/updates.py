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
from gcfed.metrics.base import ClientMetric, in_cohort, zeros
from gcfed.metrics.cohorts import RoundTable
from gcfed.utils.checked import Count, checked


class Updates(ClientMetric):
    """Appends ``round,client,tensor,norm,removed`` to ``updates.csv``. Adds nothing to the rows of metrics.

    Args:
        folder: where the file goes.
        every: rounds between two of those that are written.
    """

    name = "updates"

    @checked
    def __init__(self, folder: str, every: Count = 1) -> None:
        super().__init__(every)
        self.table = RoundTable(Path(folder) / "updates.csv", "client", "tensor", "norm", "removed")

    def note(self, stack: ClientStack, download: Download) -> Params:
        squares = []
        for name, start in self.params(download.model, 2).items():
            delta = (stack.full[name] - start).double().flatten(2)  # [K, out, in]
            norm, removed = delta.square().sum((1, 2)), delta.mean(2).square().sum(1) * delta.shape[2]
            squares.append(torch.stack([norm, removed], 1))
        return {"squares": in_cohort(torch.stack(squares, 1), stack, download)}

    def zeros(self, round: Round) -> Params:
        return {"squares": zeros(round, len(round.cohort), len(self.params(round.start, 2)), 2)}

    def summary(self, sums: Params, round: Round) -> dict[str, float]:
        """Writes them, in the order of the cohort."""
        squares = sums["squares"][round.places(round.cohort)]
        lines = (
            (client, name, f"{norm:.6g}", f"{removed:.6g}")
            for client, tensors in zip(round.cohort.tolist(), squares.sqrt().tolist(), strict=True)
            for name, (norm, removed) in zip(self.params(round.start, 2), tensors, strict=True)
        )
        self.table.append(round, lines)
        return {}
