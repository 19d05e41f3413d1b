"""Writes ``metrics.csv``: a row a round."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gcfed.runs.reading import read_metrics
from gcfed.utils.checked import SettingError, Whole, checked
from gcfed.utils.files import replacing


@checked
class RoundCSVLogger(Logger):
    """Appends one row a round to ``metrics.csv``; a resumed run drops the rows after its checkpoint.

    A metric that appears for the first time in a later round adds a column to the whole file.

    Args:
        resume_round: last finished round of the checkpoint that the run continues; 0 starts the file anew.
    """

    name = "csv"
    version = ""

    def __init__(self, path: str, resume_round: Whole = 0) -> None:
        super().__init__()
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():  # a device, which would be replaced
            raise SettingError("path", f"={path} is there, and no regular file: name another.")
        self.columns: list[str] = []
        self._resume_round: int | None = resume_round  # until the file has begun

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Begins the file; the resolved config lies beside it."""
        if self._resume_round == 0:
            self.path.unlink(missing_ok=True)
        elif self._resume_round is not None:
            rows = read_metrics(self.path, text=True)
            kept = rows[rows.index.astype(int) <= self._resume_round]
            self._write(list(kept.columns), kept.to_dict("records"))
        self._resume_round = None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "round" not in metrics:
            return
        self.log_hyperparams({})
        if new := [name for name in metrics if name not in self.columns]:
            rows = read_metrics(self.path, text=True).to_dict("records") if self.columns else []
            self._write([*self.columns, *new], rows)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(metrics)

    def _write(self, columns: list[str], rows: list[dict[Any, Any]]) -> None:
        self.columns = columns
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
