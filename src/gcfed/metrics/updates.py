"""How long each client's update is, layer by layer, and how much of it P takes out: ``updates.csv``.

With Δ_k what local training makes of client k's model, a line for each client of a round and each weight tensor:
``norm`` is ‖Δ_k‖ of the tensor and ``removed`` ‖(I − P)Δ_k‖, what gradient centralization takes out of it. Both are
``nan`` or ``inf`` where training was not finite. It shows who explodes, and where.
"""

from collections.abc import Iterator

import torch

from gcfed.federated.messages import Download, Upload
from gcfed.federated.method import ClientPart, Part
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import Metric
from gcfed.metrics.cohorts import Cohorts


class Updates(Metric, ClientPart):
    """Appends ``round,client,tensor,norm,removed`` to ``updates.csv``. Adds nothing to the rows of metrics.

    Args:
        folder: where the file goes.
        every: rounds between two of those that are written.
    """

    name = "updates"

    def __init__(self, folder: str, every: int = 1) -> None:
        super().__init__(every)
        self.table = UpdatesTable(folder, every)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self, self.table

    @torch.no_grad()
    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        if not self.due(download.round):
            return
        squares = []
        for name in self.names:
            if (start := download.model[name]).dim() > 1:
                delta = (stack.full[name] - start).double().flatten(2)  # [K, out, in]
                norm, removed = delta.square().sum((1, 2)), delta.mean(2).square().sum(1) * delta.shape[2]
                squares.append(torch.stack([norm, removed], 1))
        stack.notes["updates"] = {"squares": torch.stack(squares, 1)}


class UpdatesTable(Cohorts):
    """Writes them, in the order of the cohort."""

    name = "updates"
    head = "round,client,tensor,norm,removed\n"

    def on_broadcast(self, download: Download, round: Round) -> None:
        if self.due_in(round):
            self._weights = [name for name in self.names if download.model[name].dim() > 1]
            device = download.model[self._weights[0]].device
            shape = (len(round.cohort), len(self._weights), 2)
            self._table = torch.zeros(shape, dtype=torch.float64, device=device)  # squares

    def on_receive(self, upload: Upload, round: Round) -> None:
        if note := upload.notes.get("updates"):
            self._table[round.places(upload.clients)] = note["squares"]

    def lines(self, round: Round) -> Iterator[str]:
        (squares,) = round.reduce([self._table])
        table = squares.sqrt().tolist()
        for client, tensors in zip(round.cohort.tolist(), table, strict=True):
            for name, (norm, removed) in zip(self._weights, tensors, strict=True):
                yield f"{round.index + 1},{client},{name},{norm:.6g},{removed:.6g}\n"
