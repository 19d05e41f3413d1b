"""``metrics.csv``: a row a round."""

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gcfed.utils.files import replacing


class RoundCSVLogger(Logger):
    """Appends one row a round to ``metrics.csv``; a resumed run drops the rows after its checkpoint.

    A metric that appears for the first time in a later round adds a column to the whole file.

    Args:
        path: of the file.
        resume_round: last finished round of the checkpoint that the run continues; 0 starts the file anew.
    """

    def __init__(self, path: str, resume_round: int = 0) -> None:
        super().__init__()
        self.path = Path(path)
        self.columns: list[str] = []
        self._resume_round = resume_round
        self._started = False

    name = "csv"
    version = ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The resolved config lies beside the file."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "round" not in metrics:
            return
        if not self._started:
            self._start()
        new = [name for name in metrics if name not in self.columns]
        if new:
            self.columns += new
            self._rewrite(read_rows(self.path))
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(metrics)

    def _start(self) -> None:
        self._started = True
        if self._resume_round == 0:
            self.path.unlink(missing_ok=True)
        kept = [row for row in read_rows(self.path) if row["round"] <= self._resume_round]
        self.columns = list(dict.fromkeys(name for row in kept for name in row))
        if kept:
            self._rewrite(kept)

    def _rewrite(self, rows: list[dict[str, float]]) -> None:
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)


def read_rows(path: str | Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.csv``, numbers as numbers, empty cells left out; ``[]`` where there is no file.

    A last line that a kill cut short is left out.
    """
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text()
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    rows = []
    for row in csv.DictReader(lines):
        cells = {k: v for k, v in row.items() if v not in ("", None)}
        rows.append({k: int(v) if v.lstrip("-").isdigit() else float(v) for k, v in cells.items()})
    return rows
