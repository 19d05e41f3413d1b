"""Measurements of torchmetrics, by their names."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torchmetrics import Metric

from gcfed.federated.method import ClientStack, Download, Params, Received, Round, Setup
from gcfed.metrics.base import AT_ONCE, OwnNumbers, device_of
from gcfed.utils.checked import Count, checked


class ByName(OwnNumbers):
    """Metrics of torchmetrics of the global model on the test split: ``test/<name>``, in each tested round.

    With ``data.client_test`` also of the global model and of each client's own model on the client's test split:
    ``personal/global_<name>`` and ``personal/local_<name>``, means over the cohort. Where torchmetrics leaves the
    choice, all classes have the same weight (``average="macro"``).

    Args:
        names: such as ``auroc``, ``f1``, ``calibration_error``, ``cohen_kappa``; of numbers ``r2``,
            ``mean_absolute_error``: a class of torchmetrics in lower case, with or without ``_`` and ``score``.

    Raises:
        ValueError: at ``validate``, for a name that torchmetrics does not have or that is not for the task's labels.
    """

    @checked
    def __init__(self, names: Sequence[str], every: Count = 1) -> None:
        self.chosen, self.every = list(names), every

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.classes = self.data.num_classes if setup.module.task.has_classes else None
        self.metrics = {name: make(name, self.classes) for name in self.chosen}
        own = getattr(self.data, "client_test", None) is not None
        models = ("global", "local") if own else ()
        self.numbers = tuple(f"personal/{model}_{name}" for model in models for name in self.chosen)
        self._tested = torch.zeros(0)

    def begin(self, download: Download, round: Round) -> None:
        self._tested = round.zeros(1)
        for metric in self.metrics.values():
            metric.to(device_of(download.model)).reset()

    def on_test_batch(self, outputs: Tensor, y: Tensor) -> None:
        if len(self._tested):
            self._tested += len(y)
            for metric in self.metrics.values():
                metric.update(*self.pairs(outputs, y))

    def pairs(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, C]`` and classes ``[B]`` without padding; or numbers, ``[B]`` both."""
        if not self.module.task.has_classes:
            return outputs.flatten(), y.flatten()
        return outputs.flatten(0, -2)[real := y.flatten() >= 0], y.flatten()[real]

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        device = device_of(own)
        samples = self.data.tests_of_clients.client(int(stack.clients[row])) if self.numbers else []
        if not len(samples):
            return torch.full((len(self.numbers),), torch.nan, dtype=torch.float64, device=device)
        # All samples of a client are on this process, so nothing is synchronized.
        metrics = [make(name, self.classes, sync_on_compute=False).to(device) for name in 2 * self.chosen]
        for part in torch.as_tensor(samples, device=device).split(AT_ONCE):
            x, y = self.data.fetch(part, None)
            pairs = [self.pairs(stack.on(state, x), y) for state in (stack.start, own)]
            for i, metric in enumerate(metrics):
                metric.update(*pairs[i // len(self.chosen)])
        return torch.stack([metric.compute().double() for metric in metrics])

    def columns(self, round: Received) -> dict[str, float]:
        (tested,), self._tested = round.reduce([self._tested]), torch.zeros(0)
        found = {f"test/{name}": float(metric.compute()) for name, metric in self.metrics.items() if tested > 0}
        return found | super().columns(round)


def make(name: str, classes: int | None, **how: Any) -> Metric:
    """A metric of torchmetrics, for so many classes; None: for numbers."""
    known = {other.lower(): getattr(torchmetrics, other) for other in torchmetrics.__all__}
    wanted = name.replace("_", "").lower()
    kind = known.get(wanted) or known.get(f"{wanted}score")
    if not (isinstance(kind, type) and issubclass(kind, Metric)):
        raise ValueError(f"metrics.torchmetrics.names: torchmetrics has no {name}.")
    options = inspect.signature(kind.__new__).parameters
    if ("task" in options) != (classes is not None):
        raise ValueError(f"metrics.torchmetrics.names: {name} is not for the labels of this task.")
    if classes is None:
        return kind(**how)
    how |= {"average": "macro"} if "average" in options else {}
    return kind(task="multiclass", num_classes=classes, **how)
