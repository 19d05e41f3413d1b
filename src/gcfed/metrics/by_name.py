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
from gcfed.metrics.base import AT_ONCE, OwnNumbers, device_of
from gcfed.utils.checked import Count, checked
from gcfed.utils.refusal import Refusal


class ByName(OwnNumbers):
    """Metrics of torchmetrics of the global model on the test split: ``test/<name>``, in each
    tested round.

    With ``data.client_test`` also of the global model and of each client's own model on the
    client's test split: ``personal/global_<name>`` and ``personal/local_<name>``, means over the
    cohort. Where torchmetrics leaves the choice, all classes have the same weight
    (``average="macro"``).

    A model with an output that is not finite has no value. Numbers are in the units of
    ``test/rmse``; several targets of a sample count as one vector.

    Args:
        names: such as ``auroc``, ``f1``, ``calibration_error``, ``cohen_kappa``; of numbers ``r2``,
            ``mean_absolute_error``: a class of torchmetrics in lower case, with or without ``_``
            and ``score``.

    Raises ValueError at ``validate`` for a name that gives no number for the task's labels.
    """

    @checked
    def __init__(self, names: Sequence[str], every: Count = 1) -> None:
        self.chosen = list(dict.fromkeys(names))
        self.every = every

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        classes = self.data.num_classes if setup.module.task.has_classes else None
        self.metrics = {name: make(name, classes) for name in self.chosen}
        models = () if getattr(self.data, "client_test", None) is None else ("global", "local")
        self.numbers = tuple(f"personal/{model}_{name}" for model in models for name in self.chosen)
        # All samples of a client are on this process, so nothing is synchronized.
        self.own = [
            make(name, classes, sync_on_compute=False) for _ in models for name in self.chosen
        ]
        self._tested = torch.zeros(0)

    def begin(self, download: Download, round: Round) -> None:
        self._tested = round.zeros(2)  # number of labels, and of outputs that are not finite
        for metric in self.metrics.values():
            metric.to(device_of(download.model)).reset()

    def on_test_batch(self, outputs: Tensor, y: Tensor) -> None:
        if len(self._tested):
            self._tested += torch.stack(
                [torch.tensor(len(y), device=y.device), (~outputs.isfinite()).sum()]
            )
            for metric in self.metrics.values():
                metric.update(*self.pairs(outputs, y, metric))

    def pairs(self, outputs: Tensor, y: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
        """Probabilities ``[B, C]`` and classes ``[B]`` without padding; or
        numbers, ``[B]`` both.
        """
        task = self.module.task
        if not task.has_classes:
            mean = torch.as_tensor(
                metric.reads_zero and getattr(self.data, "scaling", {}).get("y_mean", 0.0)
            ).to(y)
            scale = getattr(task, "scale", 1.0)  # of targets that were standardized
            return (outputs * scale + mean).flatten(), (y * scale + mean).flatten()
        # torchmetrics would take logits for probabilities if those of a batch are from 0 to 1.
        shares = outputs.flatten(0, -2).softmax(
            -1, torch.promote_types(outputs.dtype, torch.float32)
        )
        labels = y.flatten()
        real = labels >= 0
        return shares[real], labels[real]

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        device = device_of(own)
        own = own | {name: t[row] for name, t in stack.personal.items()}
        samples = np.zeros(0, dtype=np.int64)
        if self.numbers and self.data.tests_of_clients is not None:
            samples = self.data.tests_of_clients.client(int(stack.clients[row]))
        if not len(samples):
            return torch.full((len(self.numbers),), torch.nan, dtype=torch.float64, device=device)
        finite = torch.ones(2, dtype=torch.bool, device=device)
        for metric in self.own:
            metric.to(device).reset()
        for part in torch.as_tensor(samples, device=device).split(AT_ONCE):
            x, y = self.data.fetch(part, None)
            outputs = [stack.on(state, x) for state in (stack.start, own)]
            finite &= torch.stack([o.isfinite().all() for o in outputs])
            for i, metric in enumerate(self.own):
                metric.update(*self.pairs(outputs[i // len(self.chosen)], y, metric))
        values = torch.stack([metric.compute().double() for metric in self.own])
        return torch.where(finite.all(), values, torch.nan)

    def columns(self, round: Received) -> dict[str, float]:
        (counts,) = round.reduce([self._tested])
        self._tested = torch.zeros(0)
        tested, odd = counts.tolist()
        found = {
            f"test/{name}": float(metric.compute())
            for name, metric in self.metrics.items()
            if tested
        }
        return {
            name: math.nan if odd else value for name, value in found.items()
        } | super().columns(round)


class Auroc(torchmetrics.classification.MulticlassAUROC):
    """The mean over classes that some samples have, and others have not. torchmetrics counts all
    others as 0.
    """

    def compute(self) -> Tensor:  # type: ignore[override]
        classes = len(torchmetrics.utilities.dim_zero_cat(self.target).unique())
        return super().compute() * (self.num_classes / classes if classes > 1 else math.nan)


KINDS = {name.lower(): getattr(torchmetrics, name) for name in torchmetrics.__all__}


def make(name: str, classes: int | None, **sync: Any) -> Metric:
    """Builds a metric of torchmetrics.

    Its attribute ``reads_zero`` tells whether its value changes if outputs and targets are shifted
    by the same number. An error in percent is an example.

    Args:
        classes: the number of classes; None for a regression.
        sync: keywords of the metric, about processes.

    Raises ValueError if there is no such metric, or if it does not return a single number.
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
    return not torch.allclose(
        _value(metric, outputs, targets), _value(metric, outputs + 8, targets + 8)
    )


def _value(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    metric.update(outputs, targets)
    value = metric.compute().reshape(())
    metric.reset()
    return value
