"""How the data lie on the clients, to be seen while the run goes on."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from gcfed.callbacks.after_round import AfterRound
from gcfed.utils.checked import checked
from gcfed.utils.pictures import show


@checked
class PartitionPicture(AfterRound):
    """Draws ``partition.png`` once the first round is over, so that the run begins no later for it.

    Args:
        folder: of the run.
        draw: whether to.
    """

    def __init__(self, folder: str, draw: bool = True) -> None:
        self.folder, self.wanted = Path(folder), draw

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        known = trainer.global_step > 0 and (self.folder / "partition.png").is_file()
        self.wanted = self.wanted and trainer.is_global_zero and not known

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if self.wanted:
            from gcfed.plots.pictures import draw_partition

            self.wanted = False
            if path := draw_partition(self.folder, trainer.datamodule):  # type: ignore[attr-defined]
                show(trainer.loggers, "partition", path, 0)
