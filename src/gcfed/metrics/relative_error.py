"""Distance of the global model to a known optimum: ‖W − W*‖ / ‖W*‖ over all parameters together (SSF, eq. 132)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gcfed.federated.method import Setup
from gcfed.federated.round import Round
from gcfed.metrics.base import ServerMetric


class RelativeError(ServerMetric):
    """Adds ``test/relative_error`` to the rows of metrics.

    Raises:
        ValueError: at ``validate``, where the optimum is not known, or not that of the data that clients have.
    """

    name = "relative_error"

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        setup.data.setup()
        optimum = setup.data.dataset.optimum
        if optimum is None:
            raise ValueError(
                f"metrics=relative_error needs a known optimum, and data={setup.data.dataset.name} has none: take "
                "data=matrix_regression."
            )
        for key in ("limit_train", "validation", "client_test"):
            if part := getattr(setup.data, key):
                raise ValueError(
                    f"data.{key}={part} moves the optimum, so metrics=relative_error would measure the distance to "
                    f"another: leave data.{key} out, and take fewer data.dataset.samples."
                )
        weighting, sizes = getattr(setup.aggregator, "weighting", "uniform"), setup.data.partition.sizes
        if weighting == "uniform" and sizes.min() < sizes.max():
            raise ValueError(
                f"metrics=relative_error: the optimum is that of all samples, and clients with {sizes.min()} to "
                f"{sizes.max()} of them count alike: take partition=natural (or, for FedAvg, aggregator=weighted_mean)."
            )
        self.network = dict(setup.module.net.named_parameters())
        if {n: (*p.shape,) for n, p in self.network.items()} != {n: v.shape for n, v in optimum.items()}:
            raise ValueError(
                f"metrics=relative_error knows the optimum of other parameters, {', '.join(optimum)}: take "
                "model=linear."
            )
        self._optimum = {name: torch.from_numpy(v) for name, v in optimum.items()}

    def columns(self, round: Round) -> dict[str, float]:
        self._optimum = {name: t.to(self.network[name].device) for name, t in self._optimum.items()}
        return {"test/relative_error": relative_error(self.network, self._optimum)}


def relative_error(params: Mapping[str, Tensor], optimum: Mapping[str, Tensor]) -> float:
    """‖W − W*‖ / ‖W*‖, name → ``[*shape]`` both."""
    gaps = [(params[name] - t).flatten() for name, t in optimum.items()]
    return (torch.cat(gaps).norm() / torch.cat([t.flatten() for t in optimum.values()]).norm()).item()
