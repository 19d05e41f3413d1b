"""The runs of all studies: another table may have made a job's run already, and each tells how long a round takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from gcfed.report.runs import Run, find_runs
from gcfed.study.overrides import identity
from gcfed.study.work import Task, task_of


class Library:
    """The runs below a folder.

    Args:
        folder: None or one that is not there: none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.runs = find_runs([folder]) if folder is not None and folder.is_dir() else []
        self._finished: dict[tuple[str, ...], list[Run]] = defaultdict(list)
        for run in self.runs:
            if run.summary:
                self._finished[identity(run.overrides)].append(run)

    def finished(self, overrides: Sequence[str], rounds: int) -> Run | None:
        """A run of at least so many rounds under the same overrides, but for those that change no result."""
        runs = self._finished.get(identity(overrides), ())
        return next((run for run in runs if int(run.summary.get("rounds", 0)) >= rounds), None)

    def tasks(self) -> Iterator[tuple[Task, Run]]:
        """What each run had to do; without those whose config cannot be read."""
        for run in self.runs:
            try:
                yield task_of(run.get), run
            except (ValueError, TypeError):
                continue


def shelf(root: Path, study: str) -> Path:
    """Where the runs of all studies lie, if a study's folder lies as it does by default: <there>/<study>/<scale>."""
    return root.parents[1] if root.parent.name == study and root.parents[1].name == "study" else root
