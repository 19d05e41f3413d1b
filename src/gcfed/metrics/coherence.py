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

from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import Metric


class Coherence(Metric):
    """Adds ``gc/rho/<tensor>`` to the rows of metrics, for the weights in the order of the network.

    Args:
        every: rounds between two measurements.
    """

    name = "coherence"

    def on_broadcast(self, round: Round) -> None:
        if self.due(round):
            self._start = {name: round.start[name] for name in self.names if round.start[name].dim() > 1}
            outputs = {name: t.new_zeros(len(t), dtype=torch.float64) for name, t in self._start.items()}
            self._means = outputs  # Σ of the means over an output's inputs, [out]
            device = next(iter(self._start.values())).device
            self._squares = torch.zeros(len(outputs) + 1, dtype=torch.float64, device=device)  # Σ ‖…‖², and clients

    @torch.no_grad()
    def on_clients_end(self, stack: ClientStack, round: Round) -> None:
        if not self.due(round):
            return
        means = {
            name: (stack.full[name] - t).flatten(2).mean(2, dtype=torch.float64) for name, t in self._start.items()
        }
        finite = torch.stack([mean_KO.isfinite().all(1) for mean_KO in means.values()]).all(0)
        for i, (name, mean_KO) in enumerate(means.items()):
            mean_KO = mean_KO.where(finite[:, None], 0.0)
            self._means[name] += mean_KO.sum(0)
            self._squares[i] += mean_KO.square().sum()
        self._squares[-1] += finite.sum()

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if not self.due(round):
            return
        *means, squares = round.reduce([*self._means.values(), self._squares])
        clients = squares[-1]
        rho = torch.stack([mean.square().sum() for mean in means]) / clients / squares[:-1]
        row |= {f"gc/rho/{name}": r for name, r in zip(self._start, rho.tolist(), strict=True) if r == r}
        del self._start, self._means
