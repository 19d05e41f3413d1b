"""How long each client's update is, layer by layer, and how much of it P takes out: ``updates.csv``.

With Δ_k what local training makes of client k's model, a line for each client of a round and each weight tensor:
``norm`` is ‖Δ_k‖ of the tensor and ``removed`` ‖(I − P)Δ_k‖, what gradient centralization takes out of it. Both are
``nan`` or ``inf`` where training was not finite. It shows who explodes, and where.
"""

from collections.abc import Iterator

import torch

from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.metrics.cohorts import Cohorts
from gcfed.utils.device import on_device


class Updates(Cohorts):
    """Appends ``round,client,tensor,norm,removed`` to ``updates.csv``. Adds nothing to the rows of metrics."""

    name = "updates"
    head = "round,client,tensor,norm,removed\n"

    def on_broadcast(self, round: Round) -> None:
        if self.due(round):
            self._start_model = {name: round.start[name] for name in self.names if round.start[name].dim() > 1}
            device = next(iter(self._start_model.values())).device
            shape = (len(round.cohort), len(self._start_model), 2)
            self._table = torch.zeros(shape, dtype=torch.float64, device=device)  # squares

    @torch.no_grad()
    def on_clients_end(self, stack: ClientStack, round: Round) -> None:
        if not self.due(round):
            return
        rows = on_device(round.places(stack.clients), self._table.device)
        for i, (name, start) in enumerate(self._start_model.items()):
            delta = (stack.full[name] - start).double().flatten(2)  # [K, out, in]
            norm, removed = delta.square().sum((1, 2)), delta.mean(2).square().sum(1) * delta.shape[2]
            self._table[rows, i] = torch.stack([norm, removed], 1)

    def lines(self, round: Round) -> Iterator[str]:
        (squares,) = round.reduce([self._table])
        table = squares.sqrt().tolist()
        for client, tensors in zip(round.cohort.tolist(), table, strict=True):
            for name, (norm, removed) in zip(self._start_model, tensors, strict=True):
                yield f"{round.index + 1},{client},{name},{norm:.6g},{removed:.6g}\n"
