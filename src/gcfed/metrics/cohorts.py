"""Who took part: ``cohorts.csv``, a line for each client of each round."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gcfed.federated.processes.strategy import rank_and_world
from gcfed.federated.round import Round
from gcfed.metrics.base import ServerMetric
from gcfed.utils.files import replacing


class Cohorts(ServerMetric):
    """Appends the ids of a round's cohort, ascending, to ``cohorts.csv``; a resumed run drops what comes after its
    checkpoint. Adds nothing to the rows of metrics.

    Args:
        folder: where the file goes.
        every: rounds between two of those that are written.
    """

    name = "cohorts"
    head = "round,client\n"

    def __init__(self, folder: str, every: int = 1) -> None:
        super().__init__(every)
        self.path = Path(folder) / f"{self.name}.csv"
        self._started = False

    def lines(self, round: Round) -> Iterator[str]:
        """A round's lines; called on every process."""
        yield from (f"{round.index + 1},{client}\n" for client in round.cohort.tolist())

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if not self.due_in(round):
            return
        lines = list(self.lines(round))
        if rank_and_world()[0] != 0:
            return
        if not self._started:
            self._start(round.index + 1)
        with self.path.open("a") as file:
            file.writelines(lines)

    def _start(self, first: int) -> None:
        """Keeps whole lines of rounds before ``first``."""
        self._started = True
        lines = self.path.read_text().splitlines(keepends=True)[1:] if self.path.exists() and first > 1 else []
        kept = [line for line in lines if line.endswith("\n") and int(line.split(",")[0]) < first]
        with replacing(self.path) as temporary:
            temporary.write_text(self.head + "".join(kept))
