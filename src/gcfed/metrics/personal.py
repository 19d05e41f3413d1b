"""Is the global model any good to a client, and would its own be better? Each on the client's own test split.

With ``data.client_test`` every client keeps a share of its samples to test on, so that what it trains and is tested on
come from the same distribution. Columns are over the clients of the cohort that have such samples, for the global model
as it was broadcast and for the client's own as its local training leaves it; spread and worst tenth are the usual
figures of fairness (Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020).
"""

import math

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.method import Part, Setup
from gcfed.metrics.base import Means
from gcfed.metrics.clients import Clients


class Personal(Clients):
    """Adds ``personal/{global,local}_{acc,worst10,std}``: mean, mean of the worst tenth (at least one client) and
    standard deviation over clients of the accuracy on their own test split.

    A client whose losses are not finite, before or after, is left out of all six.

    Args:
        every: rounds between two measurements.
    """

    name = "personal"

    def validate(self, setup: Setup) -> None:
        """Raises ValueError where clients have no test split."""
        super().validate(setup)
        if getattr(self.data, "client_test", None) is None:
            raise ValueError("metrics=personal tests clients on samples of their own: set data.client_test=0.2.")

    def samples(self, client: int) -> np.ndarray:
        return self.data.tests_of_clients.client(client)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self, Fairness(self)


class Fairness(Means):
    """Mean, spread and worst tenth over the clients of the cohort."""

    def summary(self, values_KV: Tensor) -> dict[str, float]:
        values_KV, row = values_KV[values_KV.isfinite().all(1)], dict[str, float]()
        for model, column in (("global", "clients/acc_before"), ("local", "clients/acc_after")):
            acc_K = values_KV[:, self.columns.index(column)].sort().values
            if len(acc_K):
                worst = acc_K[: math.ceil(len(acc_K) / 10)]
                figures = torch.stack([acc_K.mean(), worst.mean(), acc_K.std(correction=0)]).tolist()
                names = (f"personal/{model}_{name}" for name in ("acc", "worst10", "std"))
                row |= zip(names, figures, strict=True)
        return row
