"""Measurements of the global model beyond accuracy and loss: per class, and against a known
optimum.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.parts import Setup
from gcfed.federated.protocol.messages import Download
from gcfed.federated.protocol.rounds import Received, Round
from gcfed.methods.requirements import class_logits
from gcfed.metrics.base import RoundTable, ServerMetric, device_of
from gcfed.utils.checked import checked
from gcfed.utils.files import replacing


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

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        # [C² + 1], by class · C + prediction; the last is padding
        self._counts: Tensor | None = None
        self._last: tuple[Round, np.ndarray] | None = None

    def begin(self, download: Download, round: Round) -> None:
        cells = self.data.num_classes**2 + 1
        self._counts = torch.zeros(cells, dtype=torch.int64, device=device_of(download.model))

    def on_test_batch(self, outputs: Tensor, y: Tensor) -> None:
        if self._counts is not None:
            cell = torch.where(
                y >= 0, y * self.data.num_classes + outputs.argmax(-1), len(self._counts) - 1
            ).flatten()
            self._counts.index_add_(0, cell, torch.ones_like(cell))

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

    def on_train_end(self, *_: Any) -> None:
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
        with replacing(Path(self.folder) / "confusion.csv") as temporary:
            pd.DataFrame(matrix_CC, pd.Index(names, name="class"), names).to_csv(
                temporary, lineterminator="\n"
            )
        if self.figures:
            from gcfed.plots.pictures import plot_confusion  # matplotlib

            title = f"{self.data.dataset.name}: the test split after round {round.index + 1:,}"
            picture = Path(self.folder) / "confusion.png"
            plot_confusion(matrix_CC, names, picture, title)
            self.show(picture, round)


class RelativeError(ServerMetric):
    """‖W − W*‖ / ‖W*‖ over all parameters, for a known optimum W*: ``test/relative_error`` (SSF,
    eq. 132).

    Raises ValueError at ``validate`` if the optimum is unknown or is not the optimum of the
    clients' data.
    """

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.data.setup()
        optimum = self.data.dataset.optimum
        sizes = self.data.partition.sizes
        weighting = getattr(setup.aggregator, "weighting", "uniform")
        keys = ("limit_train", "validation", "client_test", "standardize", "feature_noise")
        changed = [key for key in keys if getattr(self.data, key)]
        self.network = dict(self.module.net.named_parameters())
        wrong = ""
        if optimum is None:
            wrong = (
                f"needs a known optimum, and data={self.data.dataset.name} has none: take"
                " data=matrix_regression"
            )
        elif changed:
            wrong = f"knows the optimum of all samples: remove data.{changed[0]}"
        elif sizes.sum() < len(self.data.labels) or (
            weighting == "uniform" and sizes.min() < sizes.max()
        ):
            wrong = (
                "knows the optimum of all samples with equal weights: take partition=natural with"
                " all groups, "
            )
            wrong += "or aggregator=weighted_mean for clients of several sizes"
        elif {n: (*p.shape,) for n, p in self.network.items()} != {
            n: v.shape for n, v in optimum.items()
        }:
            wrong = (
                f"knows the optimum of other parameters, {', '.join(optimum)}: take model=linear"
            )
        if wrong:
            raise ValueError(f"metrics=relative_error {wrong}.")
        assert optimum is not None
        self._optimum = {name: torch.from_numpy(v) for name, v in optimum.items()}

    def columns(self, round: Received) -> dict[str, float]:
        self._optimum = optimum = {
            name: t.to(self.network[name].device) for name, t in self._optimum.items()
        }
        gaps = [(self.network[name] - t).flatten() for name, t in optimum.items()]
        error = torch.cat(gaps).norm() / torch.cat([t.flatten() for t in optimum.values()]).norm()
        return {"test/relative_error": error.item()}
