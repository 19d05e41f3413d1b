"""The picture of a run's curves."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from gcfed.folders.folder import METRICS
from gcfed.folders.reading import read_metrics, tested_in
from gcfed.folders.showing import show_picture

PICTURE = "curves.png"


class Curves(Callback):
    """Draws ``curves.png`` when the last round has its row, and shows it to the loggers.

    It belongs to the fit, because the trackers close their run when the fit ends.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = read_metrics(self.folder / METRICS)
        if not tested_in(metrics, trainer.global_step):
            return
        from gcfed.plots.pictures import plot_curves  # matplotlib

        picture = self.folder / PICTURE
        plot_curves(metrics, picture)
        show_picture(trainer.loggers, picture, trainer.global_step)
