"""The pictures of one run: who holds what before its first round, and its curves at its end.

They are files of the run's folder. The loggers that accept pictures get them too: TensorBoard's
and W&B's.
"""

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from gcfed.data.datamodule import FederatedDataModule
from gcfed.folders.folder import METRICS
from gcfed.folders.reading import read_metrics, tested_in
from gcfed.folders.showing import show_picture
from gcfed.folders.writing import Holdings


def show_partition(
    data: FederatedDataModule,
    holdings: Holdings,
    folder: Path,
    loggers: Iterable[Logger],
    rounds_before: int,
) -> None:
    """Draws ``partition.png`` before the first round, so that it is seen while the run trains.

    A resumed run, with ``rounds_before`` rounds in its checkpoint, keeps the picture that it has.
    Clients of a federation do not say what they hold.
    """
    picture = folder / "partition.png"
    if holdings.counts_NC is None or (rounds_before and picture.is_file()):
        return
    from gcfed.plots.pictures import draw_partition  # matplotlib

    draw_partition(data, holdings.counts_NC, picture)
    show_picture(loggers, picture, rounds_before)


class Curves(Callback):
    """Draws ``curves.png`` when the last round has its row.

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

        picture = self.folder / "curves.png"
        plot_curves(metrics, picture)
        show_picture(trainer.loggers, picture, trainer.global_step)
