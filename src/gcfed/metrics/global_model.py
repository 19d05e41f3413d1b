"""Measurements of the global model beyond accuracy and loss: per class, and against a known
optimum.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.parts import Download, Received, Round, Setup
from gcfed.methods.requirements import class_logits
from gcfed.metrics.base import RoundTable, ServerMetric
from gcfed.utils.checked import checked
from gcfed.utils.device import device_of
from gcfed.utils.files import replacing
from gcfed.utils.refusal import Refusal


@checked
@dataclass(eq=False)
class Classes(RoundTable):
    """Accuracy on each class of the test split, and the confusion matrix: ``classes/*`` and three
    files.

    =====================  =======================================================================
    ``classes/worst_acc``  lowest accuracy of a class that the split contains
    ``classes/mean_acc``   unweighted mean over these classes (balanced accuracy)
    ``classes/best_acc``   highest accuracy of a class
    =====================  =======================================================================

    ``classes.csv`` has a line for each class of each measured round. At the end ``confusion.csv``
    counts the samples of a class (row) by the predicted class (column), and ``confusion.png`` shows
    their shares. The metric reads the outputs of the round's test, so a round without a test is not
    measured.
    """

    figures: bool = True

    name = "classes"
    header = ("class", "name", "tested", "acc")
    needs = [class_logits]
    needs_clients = False
    writes = ("classes/worst_acc", "classes/mean_acc", "classes/best_acc")

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        # [C² + 1]: entry class · C + prediction counts samples, the last one padding
        self._counts: Tensor | None = None
        self._last: tuple[Round, np.ndarray] | None = None

    def begin(self, download: Download, round: Round) -> None:
        cells = self.data.num_classes**2 + 1
        self._counts = torch.zeros(
            cells, dtype=torch.int64, device=device_of(download.broadcast_model)
        )

    def on_test_batch(self, outputs: Tensor, y: Tensor) -> None:
        if self._counts is None:
            return
        cells = y * self.data.num_classes + outputs.argmax(-1)
        padding = len(self._counts) - 1
        cells = torch.where(y >= 0, cells, padding).flatten()
        self._counts.index_add_(0, cells, torch.ones_like(cells))

    def columns(self, round: Received) -> dict[str, float]:
        assert self._counts is not None
        (counts,) = round.reduce([self._counts])
        self._counts = None
        matrix_CC = counts[:-1].reshape(self.data.num_classes, -1).cpu().numpy()
        tested = matrix_CC.sum(1)
        if not tested.any():
            return {}
        self._last = (round, matrix_CC)
        present = np.flatnonzero(tested)
        acc = matrix_CC.diagonal()[present] / tested[present]
        lines = zip(
            present.tolist(),
            self.class_names[present],
            tested[present].tolist(),
            acc.tolist(),
            strict=True,
        )
        self.append(round, lines)
        if round.index + 1 >= self.rounds:
            self._draw()  # before the checkpoint of the last round, so that a kill does not lose it
        figures = {"worst": acc.min(), "mean": acc.mean(), "best": acc.max()}
        return {f"classes/{name}_acc": float(value) for name, value in figures.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._draw()  # if the run ended early

    @property
    def class_names(self) -> np.ndarray:
        names = self.data.dataset.class_names or range(self.data.num_classes)
        return np.array([" ".join(str(name).split()) for name in names])

    def _draw(self) -> None:
        if self._last is None or rank_and_world()[0] != 0:
            return
        round, matrix_CC = self._last
        self._last = None
        names = self.class_names
        table = pd.DataFrame(matrix_CC, pd.Index(names, name="class"), names)
        with replacing(Path(self.folder) / "confusion.csv") as temporary:
            table.to_csv(temporary, lineterminator="\n")
        if self.figures:
            from gcfed.plots.pictures import plot_confusion  # matplotlib

            title = f"{self.data.dataset.name}: the test split after round {round.index + 1:,}"
            picture = Path(self.folder) / "confusion.png"
            plot_confusion(matrix_CC, names, picture, title)
            self.show(picture, round)


class RelativeError(ServerMetric):
    """‖W − W*‖ / ‖W*‖ over all parameters, for a known optimum W*: ``test/relative_error`` (SSF,
    eq. 132).

    Raises Refusal at ``validate`` if the optimum is unknown or is not the optimum of the
    clients' data.
    """

    needs_clients = False
    writes = ("test/relative_error",)

    def validate(self, setup: Setup) -> None:
        data = setup.data
        optimum = data.dataset.optimum
        if optimum is None:
            raise Refusal(
                f"metrics=relative_error needs a known optimum, and data={data.dataset.name}"
                " has none: take data=matrix_regression."
            )
        _refuse_other_samples(setup)
        network = setup.module.net.named_parameters()
        shapes = {name: tuple(param.shape) for name, param in network}
        if shapes != {name: value.shape for name, value in optimum.items()}:
            raise Refusal(
                "metrics=relative_error knows the optimum of other parameters,"
                f" {', '.join(optimum)}: take model=linear."
            )

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self.network = dict(self.module.net.named_parameters())
        optimum = self.data.dataset.optimum
        assert optimum is not None
        self._optimum = {name: torch.from_numpy(value) for name, value in optimum.items()}

    def columns(self, round: Received) -> dict[str, float]:
        gaps = []
        optima = []
        for name, optimum in self._optimum.items():
            param = self.network[name]
            optimum = optimum.to(param.device)
            gaps.append((param - optimum).flatten())
            optima.append(optimum.flatten())
        error = torch.cat(gaps).norm() / torch.cat(optima).norm()
        return {"test/relative_error": error.item()}


def _refuse_other_samples(setup: Setup) -> None:
    """Raises Refusal if clients do not train all samples, unchanged, with equal weights."""
    data = setup.data
    for key in ("limit_train", "validation", "client_test", "standardize", "feature_noise"):
        if getattr(data, key):
            raise Refusal(
                f"metrics=relative_error knows the optimum of all samples: remove data.{key}."
            )
    sizes = data.partition.sizes
    is_uniform = getattr(setup.aggregator, "weighting", "uniform") == "uniform"
    has_all = sizes.sum() >= len(data.labels)
    if not has_all or (is_uniform and sizes.min() < sizes.max()):
        raise Refusal(
            "metrics=relative_error knows the optimum of all samples with equal weights: take"
            " partition=natural with all groups, or aggregator=weighted_mean for clients of"
            " several sizes."
        )
