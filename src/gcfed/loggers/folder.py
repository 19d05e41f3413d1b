"""Loggers that write to the run's folder.

``resume_round``: the last round of the checkpoint that the run continues.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from gcfed.folders.folder import CONFIG
from gcfed.folders.rows import RoundRows

FIRST = ("gc", "method", "model", "rounds", "seed")  # columns of TensorBoard's HParams tab


class RoundCSVLogger(Logger):
    """Appends one row per round to ``path``.

    A resumed run first drops the rows after its checkpoint.
    """

    name = "csv"
    version = ""

    def __init__(self, path: str, resume_round: int = 0) -> None:
        super().__init__()
        self.path = Path(path)
        self.resume_round = resume_round
        self.rows: RoundRows | None = None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Starts the file: empty, or with the rows up to the checkpoint."""
        self.rows = RoundRows(self.path, self.resume_round)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if "round" not in metrics:
            return
        if self.rows is None:
            self.rows = RoundRows(self.path, self.resume_round)
        self.rows.append([metrics])


class RoundTensorBoardLogger(TensorBoardLogger):
    """Lightning's logger, without a subfolder.

    A resumed run drops the events of rounds after its checkpoint.

    TensorBoard sorts by name: a dot in front puts a column behind the accuracy and the
    hyperparameters of ``FIRST``.
    """

    def __init__(self, save_dir: str, resume_round: int = 0) -> None:
        purged = resume_round + 1 if resume_round else 0  # from this round on
        super().__init__(save_dir, name="", version="", purge_step=purged)
        self.resume_round = resume_round
        while resume_round and _has_events_of(int(time.time()), Path(save_dir)):
            time.sleep(0.05)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        if self.resume_round:  # TensorBoard reads the first table only
            return
        settings = {}
        for name, value in params.items():
            column = name if name in FIRST else f"·{name}"
            settings[column] = value
        table = hparams_pb(settings, trial_id="")
        self.experiment._get_file_writer().add_summary(table, 0)
        self._show_config()

    def _show_config(self) -> None:
        """Shows the command of the run and its settings, under Text."""
        path = Path(self.save_dir) / CONFIG
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            # Markdown shows indented lines as they are
            self.experiment.add_text("·config", "\n".join(f"    {line}" for line in lines), 0)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        shown = {}
        for name, value in metrics.items():
            if name == "round":
                continue
            column = name if name >= "test/" else f"·{name}"
            shown[column] = value
        super().log_metrics(shown, step)
        self.experiment.flush()

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[str], step: int | None = None) -> None:
        pixels = np.asarray(Image.open(images[0]))
        self.experiment.add_image(f"·{key}", pixels, step, dataformats="HWC")

    def save(self) -> None:
        """Writes no ``hparams.yaml``: the folder has ``config.yaml``."""


def _has_events_of(second: int, folder: Path) -> bool:
    """Whether a file of events begins in this second.

    TensorBoard reads files in the order of their names. After the second these have a counter, by
    which a 10th file comes before the 9th.
    """
    return any(folder.glob(f"events.out.tfevents.{second:010d}.*"))
