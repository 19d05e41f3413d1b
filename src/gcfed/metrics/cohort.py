"""The clients of a round, and what local training makes of their models, before anything is quantized or projected.

w is the broadcast model, w_k what client k makes of it, and Δ_k = w_k − w; parameters only. Clients whose Δ_k is not
finite are left out of every mean.
"""

from dataclasses import dataclass

import torch

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, per_client
from gcfed.metrics.base import ClientMetric, RoundTable, ServerMetric, dot, floats, in_cohort, zeros
from gcfed.utils.checked import Count, checked


@checked
@dataclass(eq=False)
class Cohorts(RoundTable, ServerMetric):
    """Who took part: ``round,client`` in ``cohorts.csv``, clients ascending. Adds nothing to the rows of metrics."""

    folder: str
    every: Count = 1

    name = "cohorts"
    header = ("client",)

    def columns(self, round: Round) -> dict[str, float]:
        self.append(round, ([client] for client in round.cohort.tolist()))
        return {}


@checked
@dataclass(eq=False)
class Updates(RoundTable, ClientMetric):
    """Who explodes, and where: ``round,client,tensor,norm,removed`` in ``updates.csv``, for each weight of each client.

    ``norm`` is ‖Δ_k‖ of the tensor and ``removed`` ‖(I − P)Δ_k‖, what gradient centralization takes out of it; ``nan``
    or ``inf`` where training was not finite. Adds nothing to the rows of metrics.
    """

    folder: str
    every: Count = 1

    name = "updates"
    header = ("client", "tensor", "norm", "removed")

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
        lengths = sums["squares"][round.places(round.cohort)].sqrt().tolist()
        lines = (
            (client, name, f"{norm:.6g}", f"{removed:.6g}")
            for client, tensors in zip(round.cohort.tolist(), lengths, strict=True)
            for name, (norm, removed) in zip(self.params(round.start, 2), tensors, strict=True)
        )
        self.append(round, lines)
        return {}


class Drift(ClientMetric):
    """How far local training leads the clients from the global model, and from each other: ``drift/*``.

    With Δ̄ the plain mean of the Δ_k of the cohort:

    ======================  ==============================================================================
    ``drift/client_norm``   mean ‖Δ_k‖
    ``drift/relative``      mean ‖Δ_k‖ / ‖w‖
    ``drift/update_norm``   ‖Δ̄‖
    ``drift/divergence``    (mean ‖Δ_k − Δ̄‖²)^½, from mean ‖Δ_k − Δ̄‖² = mean ‖Δ_k‖² − ‖Δ̄‖²
    ``drift/cosine``        mean cosine of Δ_k and Δ̄, from mean ⟨Δ_k, Δ̄⟩ / ‖Δ_k‖ = ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩
    ======================  ==============================================================================

    A stack's clients are summed where they train: two sums of the model's size, whatever the size of the cohort.
    """

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


class Coherence(ClientMetric):
    """Whether the clients agree in what gradient centralization takes out of their updates: ``gc/rho/<tensor>``.

    P takes the mean over each output's inputs out of an update. Of the m clients of a round,

        gc/rho/<tensor> = ‖mean_k (I − P)Δ_k‖² / mean_k ‖(I − P)Δ_k‖²

    is 1 where all of them take out the same, a direction in which the model is to go, and about 1/m where it is the
    noise of their own data. Of what Local GC has projected in every step, weight decay alone is left. The weights come
    in the order of the network.
    """

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
