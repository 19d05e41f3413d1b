"""How the server averages the factors of LoRA, W = W₀ + (α/r) BA: ``model.lora.average``.

- ``mean``: FedAvg of A and of B, whose product is not the mean of the products.
- ``ffa``: A keeps its random values and is not sent, so the mean of B gives the mean product
  (FFA-LoRA, arXiv 2403.12313).
- ``alternate``: odd rounds train and send B, even rounds A (RoLoRA, arXiv 2502.01755). The other
  factor is fixed. B begins: while it is 0, A has no gradient. Clients receive both, because they
  may have missed a round.
- ``fedsa``: A is averaged, each client keeps its B (FedSA-LoRA, arXiv 2410.01463). The tested
  global model has the initial B, zero: measure the clients' models (``metrics=personal``).
- ``svd``: mean_k B_k A_k = UΣVᵀ, B = U_r Σ_r, A = V_rᵀ (FlexLoRA, arXiv 2402.11505, with equal
  ranks and weights).
"""

from typing import Any

import torch

from gcfed.federated.parts import (
    ClientPart,
    ClientStates,
    Download,
    Fact,
    Order,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
    per_client,
)
from gcfed.methods.personal.kept import KEPT
from gcfed.methods.personal.tensors import Private, Withheld, withhold
from gcfed.methods.requirements import mean_aggregator, plain_server
from gcfed.models.adapters import FACTOR_A, FACTOR_B, factors
from gcfed.utils.refusal import Refusal

FIXED = (FACTOR_A, FACTOR_B)  # by RoLoRA in rounds 1, 3, … and in rounds 2, 4, …


class PrivateB(Private):
    method = "model.lora.average=fedsa"
    keeps = {"lora_b": KEPT}

    def personal_tensors(self, setup: Setup) -> list[str]:
        return factors_b(setup)


class WithheldB(Withheld):
    method = PrivateB.method

    def personal_tensors(self, setup: Setup) -> list[str]:
        return factors_b(setup)


def factors_b(setup: Setup) -> list[str]:
    """The names of the factors B that travel."""
    return [name for name in setup.module.travels if FACTOR_B in name]


class OneFactor(ClientPart):
    """RoLoRA on the clients, which train and send one factor."""

    method = "model.lora.average=alternate"
    facts = {Fact.ONE_ROUND}
    recordable = "stack"

    def validate(self, setup: Setup) -> None:
        for part in setup.parts:
            if part.order is Order.MOVES_WEIGHTS or Fact.CORRECTS_DRIFT in part.facts:
                raise Refusal(
                    f"{self.title} does not combine with {part.title}, which moves both factors."
                )

    def on_download(self, download: Download) -> None:
        self.fixed = [
            name for name in self.trained_names if FIXED[download.round_index % 2] in name
        ]

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for name in self.fixed:  # without a gradient, no optimizer moves it
            pl_module.clients.leaves[name].grad = None

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        withhold(upload, self.fixed)


class OtherFactor(Withheld):
    """RoLoRA on the server, which expects no entries of the other factor, and does not move it."""

    method = OneFactor.method

    def validate(self, setup: Setup) -> None: ...

    def on_broadcast(self, download: Download, round: Round) -> None:
        fixed = FIXED[round.index % 2]
        self.kept = {
            name: round.broadcast_model[name].shape for name in self.trained_names if fixed in name
        }

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name in self.kept:
            pl_module.net.get_parameter(name).grad = None


class MeanProduct(ServerPart):
    """Multiplies each client's factors, and splits the mean product.

    Memory: float64 ``[out, in]`` for each adapter.
    """

    method = "model.lora.average=svd"
    facts = {Fact.EDITS_MEAN}
    needs = [
        plain_server("it replaces A and B"),
        mean_aggregator("it averages the products", uniform=True),
    ]

    def bind(self, setup: Setup) -> None:
        self.pairs = {
            name: name.replace(FACTOR_A, FACTOR_B)
            for name in self.trained_names
            if FACTOR_A in name
        }

    def sums(self, round: Round) -> Params:
        sums = {}
        for name_a, name_b in self.pairs.items():
            outputs = len(round.broadcast_model[name_b])
            inputs = round.broadcast_model[name_a][0].numel()
            sums[name_a] = round.zeros(outputs, inputs)
        return sums

    def on_receive(self, upload: Upload, round: Round) -> Params:
        assert round.download is not None
        start = round.download.broadcast_model  # of late clients, an older model than the round's
        sums = {}
        for name_a, name_b in self.pairs.items():
            a = (start[name_a] + upload.delta[name_a]).double().flatten(2)
            b = (start[name_b] + upload.delta[name_b]).double().flatten(2)
            product = b @ a  # [K, out, in]
            sums[name_a] = torch.where(per_client(upload.finite, product), product, 0.0).sum(0)
        return sums

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        for name_a, name_b in self.pairs.items():
            mean = round.sums[self][name_a] / round.num_finite
            a, b = factors(mean, round.broadcast_model[name_a], round.broadcast_model[name_b])
            update[name_a] = a - round.broadcast_model[name_a]
            update[name_b] = b - round.broadcast_model[name_b]


AVERAGES: dict[str, Any] = {
    "alternate": lambda: [OneFactor(), OtherFactor()],
    "svd": lambda: [MeanProduct()],
    "fedsa": lambda: [PrivateB(), WithheldB()],
}
