"""Checks of loaded data: whether something can be learned from them, and whether network and task can use them."""

import logging

import numpy as np
from torch import nn

from gcfed.data.base import label_fix
from gcfed.data.datamodule import FederatedDataModule
from gcfed.tasks import Task

log = logging.getLogger(__name__)


def check_samples(data: FederatedDataModule) -> None:
    """Refuses data from which nothing can be learned, and warns of classes that are tested but not trained."""
    if len(empty := np.flatnonzero(data.partition.sizes == 0)):
        who = f"{len(empty)} of {data.num_clients} clients without a sample, such as client {empty[0]}: give it one"
        raise ValueError(f"partition: {type(data.partitioner).__name__} leaves {who}, or lower num_clients.")
    if data.labels.dtype.kind == "i":
        trained, tested = ({*np.unique(y[y >= 0]).tolist()} for y in (data.labels, data.test_labels))
        if len(trained) < 2:
            raise ValueError(f"data={data.dataset.name}: all training samples are of class {[*trained]}.")
        if (strange := sorted(tested - trained)) and data.labels.ndim == 1:  # some characters are rare
            log.warning("classes %s have samples in the test split, and none in the training split", strange)


def check_labels(data: FederatedDataModule, net: nn.Module, task: Task) -> None:
    """Refuses inputs that the network cannot read, and labels that the task cannot use."""
    name, model = f"data ({data.dataset.name})", type(net).__name__
    is_text = len(data.input_shape) == 1 and data.dataset.train.x.dtype.kind in "iu"
    if is_text != hasattr(net, "last_only"):
        kind, take = ("text", "model=lstm or gpt, or make them floats") if is_text else ("no text", "model=mlp")
        raise ValueError(f"{name} is {kind}, which {model} cannot read: take {take}.")
    if task.has_classes != (data.labels.dtype.kind == "i"):
        kinds = "gcfed.tasks.SquaredError for numbers, gcfed.tasks.Classification for classes, which are integers"
        fix = label_fix(data.dataset.train.y)
        raise ValueError(f"task: {type(task).__name__} is not for labels of {data.labels.dtype}: {kinds}{fix}.")
