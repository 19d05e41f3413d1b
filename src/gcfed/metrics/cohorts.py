"""Who took part: ``cohorts.csv``, a line for each client of each round; and what writes such files."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gcfed.federated.processes.strategy import rank_and_world
from gcfed.federated.round import Round
from gcfed.metrics.base import ServerMetric
from gcfed.utils.checked import Count, checked
from gcfed.utils.files import replacing


class RoundTable:
    """A CSV file whose first column is the round, written by the first process; a resumed run drops what comes after
    its checkpoint.

    Args:
        path: where it goes.
        columns: behind ``round``.
    """

    def __init__(self, path: Path, *columns: str) -> None:
        self.path, self.columns = path, ("round", *columns)
        self._started = False

    def append(self, round: Round, lines: Iterable[Iterable[Any]]) -> None:
        """The lines of a round, each without its number."""
        if rank_and_world()[0] != 0:
            return
        if not self._started:
            self._start(round.index + 1)
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((round.index + 1, *line) for line in lines)

    def _start(self, first: int) -> None:
        """Keeps whole lines of rounds before ``first``."""
        self._started = True
        lines = self.path.read_text().splitlines(keepends=True)[1:] if self.path.exists() and first > 1 else []
        kept = [line for line in lines if line.endswith("\n") and int(line.split(",")[0]) < first]
        with replacing(self.path) as temporary:
            temporary.write_text(",".join(self.columns) + "\n" + "".join(kept))


class Cohorts(ServerMetric):
    """Appends the ids of a round's cohort, ascending, to ``cohorts.csv``. Adds nothing to the rows of metrics.

    Args:
        folder: where the file goes.
        every: rounds between two of those that are written.
    """

    name = "cohorts"

    @checked
    def __init__(self, folder: str, every: Count = 1) -> None:
        super().__init__(every)
        self.table = RoundTable(Path(folder) / "cohorts.csv", "client")

    def columns(self, round: Round) -> dict[str, float]:
        self.table.append(round, ([client] for client in round.cohort.tolist()))
        return {}
