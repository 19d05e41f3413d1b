"""How the server averages the factors of LoRA, W = W₀ + (α/r) BA: ``model.lora.average``.

mean   FedAvg of A and of B, whose product is not the mean of the products.
ffa    A keeps its random values and is not sent, so the mean of B gives the mean product (FFA-LoRA, arXiv 2403.12313).
fedsa  A is averaged, each client keeps its B (FedSA-LoRA, arXiv 2410.01463). The tested global model has the initial B,
       zero: measure the clients' models (metrics=personal).
svd    mean_k B_k A_k = UΣVᵀ, B = U_r Σ_r, A = V_rᵀ (FlexLoRA, arXiv 2402.11505, with equal ranks and weights).
"""

import torch

from gcfed.adapters.network import A, B
from gcfed.federated.method import Method, Params, Received, Round, ServerPart, Setup, Upload
from gcfed.federated.training.stack import per_client
from gcfed.methods.local_norm import LocalNorm
from gcfed.methods.personal import Private, Withheld
from gcfed.methods.requirements import mean_aggregator, plain_server


class FedSA(Method):
    """Clients keep the factors B."""

    def __init__(self) -> None:
        super().__init__(client := PrivateB("body", None), Withheld(client))


class PrivateB(Private):
    keeps = {"lora_b": LocalNorm.keeps["batch_norm"]}

    def choose(self, setup: Setup) -> list[str]:
        return [name for name in setup.module.travels if B in name]


class MeanProduct(ServerPart):
    """Multiplies each client's factors, and splits the mean product; the largest entry of each row of A is positive.

    Memory: a float64 matrix ``[out, in]`` for each adapter.
    """

    method = "model.lora.average=svd"
    facts = {"edits the mean"}
    needs = [plain_server("it replaces A and B"), mean_aggregator("it averages the products", uniform=True)]

    def validate(self, setup: Setup) -> None:
        self.pairs = {name: name.replace(A, B) for name in self.trained_names if A in name}

    def sums(self, round: Round) -> Params:
        return {a: round.zeros(len(round.start[b]), round.start[a][0].numel()) for a, b in self.pairs.items()}

    def on_receive(self, upload: Upload, round: Round) -> Params:
        w_K = {n: (round.start[n] + t).double().flatten(2) for n, t in upload.delta.items() if ".lora_" in n}
        products = {a: w_K[b] @ w_K[a] for a, b in self.pairs.items()}  # [K, out, in]
        return {a: torch.where(per_client(upload.finite, t), t, 0.0).sum(0) for a, t in products.items()}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        for a, b in self.pairs.items():
            u, s, v = torch.linalg.svd(round.sums[self][a] / round.num_finite, full_matrices=False)
            r = min(len(round.start[a]), len(s))  # a rank above the layer's leaves zeros
            sign = v[:r].gather(1, v[:r].abs().argmax(1, keepdim=True)).sign()
            for name, factor in ((a, v[:r] * sign), (b, u[:, :r] * s[:r] * sign.T)):
                start = round.start[name]
                new = torch.zeros_like(start.flatten(1))
                new[: len(factor), : factor.shape[1]] = factor
                update[name] = new.view(start.shape) - start


AVERAGES = {"fedsa": FedSA, "svd": MeanProduct}
