"""Measurements of torchmetrics, by their names."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.wrappers import Running

from gcfed.federated.parts import ClientStack, Download, Params, Received, Round, Setup
from gcfed.metrics.base import AT_ONCE, OwnNumbers
from gcfed.utils.checked import Count, checked
from gcfed.utils.device import device_of
from gcfed.utils.refusal import Refusal


class ByName(OwnNumbers):
    """Metrics of torchmetrics: ``test/<name>``, of the global model on the test split, in each
    tested round.

    With ``data.client_test`` there are also ``personal/global_<name>`` of the global model and
    ``personal/local_<name>`` of each client's own model, on the client's test split. They are means
    over the cohort. Where torchmetrics leaves the choice, all classes have the same weight
    (``average="macro"``).

    A model with an output that is not finite has no value. Numbers are in the units of
    ``test/rmse``. Several targets of a sample count as one vector.

    Args:
        names: classes of torchmetrics in lower case, with or without ``_`` and ``score``. Examples
            for classes are ``auroc``, ``f1``, ``calibration_error`` and ``cohen_kappa``, for
            numbers ``r2`` and ``mean_absolute_error``.

    Raises Refusal at ``bind`` for a name that gives no number for the task's labels.
    """

    needs_clients = False  # clients add their own test splits

    @checked
    def __init__(self, names: Sequence[str], every: Count = 1) -> None:
        self.chosen = list(dict.fromkeys(names))
        self.every = every

    @property
    def writes(self) -> Sequence[str]:  # type: ignore[override]
        columns = []
        for model in ("test/", "personal/global_", "personal/local_"):
            columns += [f"{model}{name}" for name in self.chosen]
        return columns

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        classes = self.data.num_classes if setup.module.task.has_classes else None
        self.metrics = {name: make(name, classes) for name in self.chosen}
        self.numbers = ()
        self.of_models: list[list[Metric]] = []  # of the global and of a client's own model
        if getattr(self.data, "client_test", None) is not None:
            for model in ("global", "local"):
                self.numbers += tuple(f"personal/{model}_{name}" for name in self.chosen)
                # All samples of a client are on this process, so nothing is synchronized.
                self.of_models.append(
                    [make(name, classes, sync_on_compute=False) for name in self.chosen]
                )
        self._tested = torch.zeros(0)

    def begin(self, download: Download, round: Round) -> None:
        self._tested = round.zeros(2)  # number of labels, and of outputs that are not finite
        for metric in self.metrics.values():
            metric.to(device_of(download.broadcast_model)).reset()

    def on_test_batch(self, outputs: Tensor, y: Tensor) -> None:
        if not len(self._tested):
            return
        self._tested[0] += len(y)
        self._tested[1] += (~outputs.isfinite()).sum()
        for metric in self.metrics.values():
            metric.update(*self.pairs(outputs, y, metric))

    def pairs(self, outputs: Tensor, y: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
        """What a metric reads: probabilities ``[B, C]`` and classes ``[B]`` without padding, or
        numbers and targets, each ``[B]``.
        """
        if not self.module.task.has_classes:
            return self._in_units(outputs, metric), self._in_units(y, metric)
        # torchmetrics would take logits for probabilities if those of a batch are from 0 to 1.
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        probabilities = outputs.flatten(0, -2).softmax(-1, dtype)
        labels = y.flatten()
        is_real = labels >= 0
        return probabilities[is_real], labels[is_real]

    def _in_units(self, values: Tensor, metric: Metric) -> Tensor:
        """Standardized numbers in the units of the targets, ``[B]``."""
        scaling = getattr(self.data, "scaling", {})
        values = values * torch.as_tensor(scaling.get("y_std", 1.0)).to(values)
        if metric.reads_zero:
            values = values + torch.as_tensor(scaling.get("y_mean", 0.0)).to(values)
        return values.flatten()

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        device = device_of(own)
        own = own | {name: t[row] for name, t in stack.personal.items()}
        samples = np.zeros(0, dtype=np.int64)
        if self.numbers and self.data.tests_of_clients is not None:
            samples = self.data.tests_of_clients.client(int(stack.clients[row]))
        if not len(samples):
            return torch.full((len(self.numbers),), torch.nan, dtype=torch.float64, device=device)
        metrics = [metric for of_model in self.of_models for metric in of_model]
        for metric in metrics:
            metric.to(device).reset()
        finite = torch.tensor(True, device=device)
        for part in torch.as_tensor(samples, device=device).split(AT_ONCE):
            x, y = self.data.fetch(part, None)
            for state, of_model in zip((stack.broadcast_model, own), self.of_models, strict=True):
                outputs = stack.on(state, x)
                finite &= outputs.isfinite().all()
                for metric in of_model:
                    metric.update(*self.pairs(outputs, y, metric))
        values = torch.stack([metric.compute().double() for metric in metrics])
        return torch.where(finite, values, torch.nan)

    def columns(self, round: Received) -> dict[str, float]:
        (counts,) = round.reduce([self._tested])
        self._tested = torch.zeros(0)
        tested, not_finite = counts.tolist()
        values = {}
        if tested:
            for name, metric in self.metrics.items():
                value = float(metric.compute())
                values[f"test/{name}"] = math.nan if not_finite else value
        return values | super().columns(round)


class Auroc(torchmetrics.classification.MulticlassAUROC):
    """The mean over the classes that the samples have; NaN if they all have one class.

    torchmetrics counts an absent class as 0 instead.
    """

    def compute(self) -> Tensor:  # type: ignore[override]
        classes = len(torchmetrics.utilities.dim_zero_cat(self.target).unique())
        return super().compute() * (self.num_classes / classes if classes > 1 else math.nan)


KINDS = {name.lower(): getattr(torchmetrics, name) for name in torchmetrics.__all__}


def make(name: str, classes: int | None, **sync: Any) -> Metric:
    """Builds a metric of torchmetrics.

    Its attribute ``reads_zero`` is True if its value changes when the same number is added to
    outputs and targets. An error in percent is an example.

    Args:
        classes: the number of classes; None for a regression.
        sync: keywords of the metric that concern several processes.

    Raises Refusal if there is no such metric, or if it does not return a single number.
    """
    wanted = name.replace("_", "").lower()
    kind = KINDS.get(wanted) or KINDS.get(f"{wanted}score")
    if not (isinstance(kind, type) and issubclass(kind, Metric)):
        raise Refusal(f"metrics.torchmetrics.names: torchmetrics has no {name}.")
    options = inspect.signature(kind.__new__).parameters
    is_for_task = ("task" in options) == (classes is not None)
    if not is_for_task or issubclass(kind, BaseAggregator | Running):
        raise Refusal(f"metrics.torchmetrics.names: {name} is not for the labels of this task.")
    settings = dict(sync)
    if classes is not None:
        settings |= {"task": "multiclass", "num_classes": classes}
        if "average" in options:
            settings["average"] = "macro"
    try:
        if kind is torchmetrics.AUROC:
            metric: Metric = Auroc(classes or 0, **sync)
        else:
            metric = kind(**settings)
        metric.reads_zero = _reads_zero(metric, classes)
    except Exception as error:
        raise Refusal(
            f"metrics.torchmetrics.names: {name} gives no single number here: {error}"
        ) from error
    return metric


def _reads_zero(metric: Metric, classes: int | None) -> bool:
    """Whether the metric changes if outputs and targets are shifted. Resets the metric.

    Raises an error of any type if the metric gives no single number.
    """
    if classes is not None:
        labels = torch.arange(classes).repeat(2)
        _value(metric, torch.eye(classes).repeat(2, 1), labels)
        return False
    outputs = torch.arange(8.0).flip(0)
    targets = torch.arange(8.0)
    value = _value(metric, outputs, targets)
    return not torch.allclose(_value(metric, outputs + 8, targets + 8), value)


def _value(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    metric.update(outputs, targets)
    value = metric.compute().reshape(())
    metric.reset()
    return value
