"""Refuses data from which a run could not learn: before it begins, from the loaded data, the
network and the task.
"""

import logging

import numpy as np
from torch import nn

from gcfed.data.base import label_fix
from gcfed.data.datamodule import FederatedDataModule
from gcfed.tasks import Task
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)


def check_samples(data: FederatedDataModule) -> None:
    """Refuses data from which nothing can be learned, and warns of classes that are tested but
    not trained.
    """
    empty = np.flatnonzero(data.partition.sizes == 0)
    if len(empty):
        raise Refusal(
            f"partition: {type(data.partitioner).__name__} leaves {len(empty)} of"
            f" {data.num_clients} clients without a sample, such as client {empty[0]}: give it"
            " one, or lower num_clients."
        )
    if data.labels.dtype.kind == "i":
        _check_classes(data)


def _check_classes(data: FederatedDataModule) -> None:
    trained = np.unique(data.labels[data.labels >= 0])
    if len(trained) < 2:
        raise Refusal(
            f"data={data.dataset.name}: all training samples are of class {trained.tolist()}."
        )
    strange = np.setdiff1d(data.test_labels[data.test_labels >= 0], trained)
    # some characters are rare
    if len(strange) and data.labels.ndim == 1:
        names = data.dataset.class_names or range(data.num_classes)
        log.warning(
            "%d classes, such as %s, are tested and have no training sample",
            len(strange),
            names[strange[0]],
        )


def check_labels(data: FederatedDataModule, net: nn.Module, task: Task) -> None:
    """Refuses inputs that the network cannot read, and labels that the task cannot use."""
    _check_inputs(data, net)
    if task.has_classes == (data.labels.dtype.kind == "i"):
        return
    kinds = (
        "gcfed.tasks.SquaredError for numbers, gcfed.tasks.Classification for classes,"
        " which are integers"
    )
    fix = label_fix(data.dataset.train.y)
    if not task.has_classes:
        fix = ": y.astype(float), or data.regression=true, makes numbers of whole numbers"
    raise Refusal(
        f"task: {type(task).__name__} is not for labels of {data.labels.dtype}: {kinds}{fix}."
    )


def _check_inputs(data: FederatedDataModule, net: nn.Module) -> None:
    name = f"data ({data.dataset.name})"
    model = type(net).__name__
    reads_text = hasattr(net, "last_only")
    if data.is_text and not reads_text:
        raise Refusal(
            f"{name} is text, which {model} cannot read: take model=lstm or gpt, or make them"
            " floats."
        )
    if not data.is_text and reads_text:
        raise Refusal(f"{name} is no text, which {model} cannot read: take model=mlp.")
    known = getattr(net, "num_tokens", None)
    if not data.is_text or known is None:
        return
    most = max(int(split.x.max(initial=0)) for split in data.splits.values())
    if most >= known:
        raise Refusal(
            f"{name} has the token {most}, and {model} knows the tokens 0 to {known - 1}: raise"
            " model.vocabulary, or take the tokenizer of the network's folder."
        )
