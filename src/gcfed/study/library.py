"""The runs of all studies: another table may have made a job's run already, and each tells how long a round takes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from gcfed.report.runs import Run, find_runs
from gcfed.study.state import Made, has_ended, made_of


class Library:
    """The runs below a folder.

    Args:
        folder: None or one that is not there: none.

    Attributes:
        runs: with what each was made with; without those whose config cannot be read.
    """

    def __init__(self, folder: Path | None) -> None:
        found = find_runs([folder]) if folder is not None and folder.is_dir() else []
        self.runs = [(made_of(run), run) for run in found if run.config]
        self._ended: dict[str, list[tuple[Made, Run]]] = defaultdict(list)
        for made, run in self.runs:
            if has_ended(run):
                self._ended[made.key].append((made, run))

    def finished(self, wanted: Made) -> Run | None:
        """A run that is as good as one that was made as wanted."""
        alike = (run for made, run in self._ended[wanted.key] if not _odds(made, wanted))
        return next(alike, None)

    def near(self, wanted: Made) -> str:
        """In what the runs of the same setting differ that are not as wanted, with a folder; "" where there is none."""
        odd = ((_odds(made, wanted), run.folder) for made, run in self._ended[wanted.key])
        return next((f"{why}: {folder.parent}" for why, folder in odd if why), "")


def _odds(made: Made, wanted: Made) -> str:
    if made.rounds != wanted.rounds:
        return f"rounds is {made.rounds} there, {wanted.rounds} here"
    return made.other_measure(wanted)


def shelf(root: Path, study: str) -> Path:
    """Where the runs of all studies lie, if a study's folder lies as it does by default: <there>/<study>/<scale>."""
    return root.parents[1] if root.parent.name == study and root.parents[1].name == "study" else root
