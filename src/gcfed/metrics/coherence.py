"""Whether the clients agree in what gradient centralization takes out of their updates.

P takes the mean over each output's inputs out of an update Δ_k of a layer: (I − P)Δ_k. Of the m clients of a round,

    gc/rho/<tensor> = ‖mean_k (I − P)Δ_k‖² / mean_k ‖(I − P)Δ_k‖²

is 1 where all of them take out the same: a direction in which the model is to go. It is about 1/m where what they take
out has nothing to do with each other: noise of their own data. Measured on the weights, for any method, on Δ_k as local
training leaves it: of what Local GC has projected in every step, weight decay alone is left. Clients whose Δ_k is not
finite are left out.
"""

import torch

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import ClientMetric, zeros


class Coherence(ClientMetric):
    """Adds ``gc/rho/<tensor>`` to the rows of metrics, for the weights in the order of the network."""

    name = "coherence"

    def zeros(self, round: Round) -> Params:
        """Of the means by weight; under "" of their squares, and of the number of clients."""
        weights = self.params(round.start, 2)
        return {name: zeros(round, len(t)) for name, t in weights.items()} | {"": zeros(round, len(weights) + 1)}

    def note(self, stack: ClientStack, download: Download) -> Params:
        start = self.params(download.model, 2)
        means = {name: (stack.full[name] - t).flatten(2).mean(2, dtype=torch.float64) for name, t in start.items()}
        finite = torch.stack([mean_KO.isfinite().all(1) for mean_KO in means.values()]).all(0)
        means = {name: mean_KO.where(finite[:, None], 0.0) for name, mean_KO in means.items()}
        squares = torch.stack([*(mean_KO.square().sum() for mean_KO in means.values()), finite.sum()])
        return {"": squares} | {name: mean_KO.sum(0) for name, mean_KO in means.items()}

    def summary(self, sums: Params, round: Round) -> dict[str, float]:
        *squares, clients = sums.pop("")
        rho = torch.stack([mean.square().sum() for mean in sums.values()]) / clients / torch.stack(squares)
        return {f"gc/rho/{name}": r for name, r in zip(sums, rho.tolist(), strict=True) if r == r}
