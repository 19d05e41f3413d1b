"""Which classes the global model knows: its accuracy on each class of the test split, and what it takes for what.

=====================  =======================================================================
``classes/worst_acc``  accuracy on the class where it is lowest, of those that the split has
``classes/mean_acc``   mean over these classes, whatever their sizes (balanced accuracy)
``classes/best_acc``   accuracy on the class where it is highest
=====================  =======================================================================

``classes.csv`` has a line for each class of each measured round. At the end ``confusion.csv`` counts how many samples
of a class (row) were taken for which (column), and ``confusion.png`` shows their shares. All is counted from the
outputs of the round's own test: it costs no pass over the data, and a round that is not tested is not measured.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from gcfed.federated.messages import Download
from gcfed.federated.method import Setup
from gcfed.federated.processes.strategy import rank_and_world
from gcfed.federated.round import Round
from gcfed.metrics.base import ServerMetric, device_of
from gcfed.metrics.cohorts import RoundTable
from gcfed.utils.checked import Count, checked
from gcfed.utils.files import replacing
from gcfed.utils.pictures import show


@checked
@dataclass(eq=False)
class Classes(ServerMetric):
    """Adds ``classes/*`` to the rows of metrics, and ``round,class,name,tested,acc`` to ``classes.csv``.

    Args:
        folder: where files go.
        every: rounds between two measurements.
        figures: whether to draw ``confusion.png``.
    """

    folder: str
    every: Count = 1
    figures: bool = True

    name = "classes"
    needs_classes = True

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.table = RoundTable(Path(self.folder) / "classes.csv", "class", "name", "tested", "acc")
        self._counts: Tensor | None = None  # of class · C + prediction, and behind them of padding
        self._last: tuple[Round, np.ndarray] | None = None

    def begin(self, download: Download, round: Round) -> None:
        cells = self.data.num_classes**2 + 1
        self._counts = torch.zeros(cells, dtype=torch.int64, device=device_of(download.model))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._counts is not None and dataloader_idx == 0:
            logits, y = outputs
            cell = torch.where(y >= 0, y * self.data.num_classes + logits.argmax(-1), len(self._counts) - 1).flatten()
            self._counts.index_add_(0, cell, torch.ones_like(cell))

    def columns(self, round: Round) -> dict[str, float]:
        assert self._counts is not None
        (counts,), self._counts = round.reduce([self._counts]), None
        matrix_CC = counts[:-1].reshape(self.data.num_classes, -1).cpu().numpy()
        tested = matrix_CC.sum(1)
        if not tested.any():
            return {}
        self._last, present = (round, matrix_CC), np.flatnonzero(tested)
        acc = matrix_CC.diagonal()[present] / tested[present]
        lines = zip(present.tolist(), self.class_names[present], tested[present].tolist(), acc.tolist(), strict=True)
        self.table.append(round, lines)
        if round.index + 1 >= self.rounds:
            self._draw()  # before the checkpoint of the last round, so that a kill does not lose it
        return {
            f"classes/{name}_acc": float(of(acc)) for name, of in (("worst", min), ("mean", np.mean), ("best", max))
        }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw()  # of a run that was ended early

    @property
    def class_names(self) -> np.ndarray:
        names = self.data.dataset.class_names or range(self.data.num_classes)
        return np.array([" ".join(str(name).split()) for name in names])

    def _draw(self) -> None:
        if self._last is None or rank_and_world()[0] != 0:
            return
        (round, matrix_CC), self._last = self._last, None
        with replacing(Path(self.folder) / "confusion.csv") as temporary, temporary.open("w", newline="") as file:
            rows = zip(self.class_names, matrix_CC.tolist(), strict=True)
            csv.writer(file, lineterminator="\n").writerows(
                [["class", *self.class_names], *([name, *row] for name, row in rows)]
            )
        if self.figures:
            from gcfed.plots.pictures import plot_confusion  # matplotlib

            picture = Path(self.folder) / "confusion.png"
            title = f"{self.data.dataset.name}: the test split after round {round.index + 1:,}"
            plot_confusion(matrix_CC, self.class_names, picture, title)
            show(self.module.trainer.loggers, "confusion", picture, round.index + 1)
