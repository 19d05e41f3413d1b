"""Whether the clients agree in what gradient centralization takes out of their updates.

P takes the mean over each output's inputs out of an update Δ_k of a layer: (I − P)Δ_k. Of the m clients of a round,

    gc/rho/<tensor> = ‖mean_k (I − P)Δ_k‖² / mean_k ‖(I − P)Δ_k‖²

is 1 where all of them take out the same: a direction in which the model is to go. It is about 1/m where what they take
out has nothing to do with each other: noise of their own data. Measured on the weights, for any method, on Δ_k as local
training leaves it: of what Local GC has projected in every step, weight decay alone is left. Clients whose Δ_k is not
finite are left out.
"""

from typing import Any

import torch

from gcfed.federated.messages import Download, Upload
from gcfed.federated.method import ClientPart, Part
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import Metric, ServerMetric


class Coherence(Metric, ClientPart):
    """Adds ``gc/rho/<tensor>`` to the rows of metrics, for the weights in the order of the network.

    Args:
        every: rounds between two measurements.
    """

    name = "coherence"

    @property
    def parts(self) -> tuple[Part, ...]:
        return self, CoherenceSums(self.every)

    @torch.no_grad()
    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        if not self.due(download.round):
            return
        start = {name: download.model[name] for name in self.names if download.model[name].dim() > 1}
        means = {name: (stack.full[name] - t).flatten(2).mean(2, dtype=torch.float64) for name, t in start.items()}
        finite = torch.stack([mean_KO.isfinite().all(1) for mean_KO in means.values()]).all(0)
        means = {name: mean_KO.where(finite[:, None], 0.0) for name, mean_KO in means.items()}
        squares = torch.stack([*(mean_KO.square().sum() for mean_KO in means.values()), finite.sum()])
        stack.notes["coherence"] = {"": squares} | {name: mean_KO.sum(0) for name, mean_KO in means.items()}


class CoherenceSums(ServerMetric):
    """Adds up the stacks' sums."""

    name = "coherence"

    def on_broadcast(self, download: Download, round: Round) -> None:
        if self.due_in(round):
            weights = {name: t for name, t in download.model.items() if name in self.names and t.dim() > 1}
            self._means = {name: t.new_zeros(len(t), dtype=torch.float64) for name, t in weights.items()}
            device = next(iter(weights.values())).device
            self._squares = torch.zeros(len(weights) + 1, dtype=torch.float64, device=device)  # Σ ‖…‖², and clients

    def on_receive(self, upload: Upload, round: Round) -> None:
        if note := upload.notes.get("coherence"):
            self._squares += note[""]
            for name, mean in self._means.items():
                mean += note[name]

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if not self.due_in(round):
            return
        *means, squares = round.reduce([*self._means.values(), self._squares])
        clients = squares[-1]
        rho = torch.stack([mean.square().sum() for mean in means]) / clients / squares[:-1]
        row |= {f"gc/rho/{name}": r for name, r in zip(self._means, rho.tolist(), strict=True) if r == r}
        del self._means
