"""Is the global model any good to a client, and would its own be better? Each on the client's own test split.

With ``data.client_test`` every client keeps a share of its samples to test on, so that what it trains and is tested on
come from the same distribution. Columns are over the clients of the cohort that have such samples, for the global model
as it was broadcast and for the client's own as its local training leaves it; spread and worst tenth are the usual
figures of fairness (Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020).
"""

import math

import numpy as np

from gcfed.federated.forward import Params
from gcfed.federated.method import Setup
from gcfed.federated.round import Round
from gcfed.metrics.base import floats
from gcfed.metrics.clients import Clients


class Personal(Clients):
    """Adds ``personal/{global,local}_{acc,worst10,std}``: mean, mean of the worst tenth (at least one client) and
    standard deviation over clients of the accuracy on their own test split.

    A client whose losses are not finite, before or after, is left out of all six.

    Raises:
        ValueError: at ``validate``, clients without a test split.
    """

    name = "personal"

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        if getattr(self.data, "client_test", None) is None:
            raise ValueError("metrics=personal tests clients on samples of their own: set data.client_test=0.2.")

    def samples(self, client: int) -> np.ndarray:
        return self.data.tests_of_clients.client(client)

    def summary(self, sums: Params, round: Round) -> dict[str, float]:
        values_KV = sums["values"][round.places(round.cohort)]
        values_KV, row = values_KV[values_KV.isfinite().all(1)], dict[str, float]()
        for model, column in (("global", "clients/acc_before"), ("local", "clients/acc_after")):
            acc_K = values_KV[:, self.columns.index(column)].sort().values
            if len(acc_K):
                worst = acc_K[: math.ceil(len(acc_K) / 10)].mean()
                figures = {"acc": acc_K.mean(), "worst10": worst, "std": acc_K.std(correction=0)}
                row |= floats({f"personal/{model}_{name}": figure for name, figure in figures.items()})
        return row
