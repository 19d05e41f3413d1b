"""Run folders as the report sees them: config, overrides, summary, curves, and how each run ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from gcfed.utils.resolvers import OVERRIDES

Array = NDArray[np.float64]
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML was built with it

FINISHED, DIVERGED, FAILED, UNFINISHED = STATES = ("finished", "diverged", "failed", "unfinished")
FAILURE = "failure.txt"


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        columns: of ``metrics.csv``, NaN where a cell is empty; {} where nothing was measured.
        summary: ``summary.json``; {} where the run has not come to its end.
        config: shared in parts with other runs: not to be written to.
        state: "finished"; "diverged": it came to its end, but its loss is not finite or no client of its last round
            sent finite numbers; "failed": an error ended it; "unfinished": it was stopped, or is still running.
        note: the rest in one sentence; "" for a finished run.
    """

    folder: Path
    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    summary: Mapping[str, Any]
    columns: Mapping[str, Array]
    state: str
    note: str

    def get(self, key: str, default: Any = None) -> Any:
        """The config's value at a dotted key."""
        node: Any = self.config
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def curve(self, name: str) -> tuple[Array, Array]:
        """The rounds and values [n] of a column where it was measured; infinities stay, NaN do not."""
        if name not in self.columns:
            return np.empty(0), np.empty(0)
        known = ~np.isnan(self.columns[name])
        return self.columns["round"][known], self.columns[name][known]

    @property
    def seed(self) -> int:
        return int(self.get("seed", 0))

    @property
    def rounds(self) -> int:
        """The rounds that it has finished; ``get("rounds")`` are those that it was to train."""
        return last_round(self.columns)


def find_runs(roots: Iterable[str | Path]) -> list[Run]:
    """Every run below the folders, sorted by path: a run's folder holds ``config.yaml`` and ``overrides.yaml``.

    Raises:
        FileNotFoundError: a root is not there.
    """
    found = {folder.resolve() for folder, files in folders(roots) if is_run(files)}
    return [read_run(folder) for folder in sorted(found)]


def folders(roots: Iterable[str | Path]) -> Iterator[tuple[Path, list[str]]]:
    """Every folder below the roots once, with the names of its files; through links, but not into runs nor ``.git``.

    Raises:
        FileNotFoundError: a root is not there.
    """
    entered: set[tuple[int, int]] = set()
    for root in map(Path, roots):
        if not root.is_dir():
            raise FileNotFoundError(
                f"roots={root}: there is no such folder. Runs lie in logs/, or where hydra.run.dir put them."
            )
        for name, below, files in os.walk(root, followlinks=True):
            place = Path(name).stat()
            if (place.st_dev, place.st_ino) in entered:  # a link back up would go on for ever
                below.clear()
                continue
            entered.add((place.st_dev, place.st_ino))
            # No run holds another; its checkpoints and events are many.
            below[:] = [] if is_run(files) else [b for b in below if not b.startswith(".")]
            yield Path(name), files


def is_run(files: Collection[str]) -> bool:
    """Whether a folder with these files is a run's."""
    return "config.yaml" in files and OVERRIDES in files


def read_run(folder: Path) -> Run:
    """Reads one folder. A file that cannot be read makes the run a failed one, with the reason, never an error."""
    config: Mapping[str, Any] = {}  # stays so where it has no rounds or seed: such a run is of no setting
    overrides: tuple[str, ...] = ()
    try:
        settings = read_config((folder / "config.yaml").read_text())
        planned, _ = int(settings["rounds"]), int(settings.get("seed", 0))
        config = settings
        overrides = tuple(map(str, yaml.load((folder / OVERRIDES).read_text(), Loader) or ()))
        path = folder / "summary.json"
        summary = dict(json.loads(path.read_text())) if path.is_file() else {}
        columns = read_columns(folder / "metrics.csv")
        state, note = ending(folder, planned, summary, columns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = f"its files cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
        return Run(folder, config, overrides, {}, {}, FAILED, reason)
    return Run(folder, config, overrides, summary, columns, state, note)


def read_config(text: str) -> Any:
    """What YAML reads, but each block of the top level once: most are alike in all runs of a sweep."""
    try:
        blocks = [_block(block) for block in re.split(r"\n(?=[^\s#-])", text)]
    except yaml.YAMLError:
        blocks = [None]
    if all(isinstance(block, dict) for block in blocks):
        return {key: value for block in blocks for key, value in block.items()}
    return yaml.load(text, Loader) or {}  # not as a run writes it


@lru_cache(maxsize=4096)
def _block(text: str) -> Any:
    return yaml.load(text, Loader)


def read_columns(path: Path) -> dict[str, Array]:
    """A ``metrics.csv`` by column; a last line that a kill cut short is left out."""
    if not path.is_file():
        return {}
    text = path.read_text()
    header, _, body = text[: text.rfind("\n") + 1].partition("\n")
    if not body:
        return {}
    names = header.split(",")
    # Not through csv: reading is most of a report's time. Two empty cells in a row need the second pass.
    cells = f",{body}".replace("\n", ",").replace(",,", ",nan,").replace(",,", ",nan,").split(",")[1:-1]
    if "round" not in names or len(cells) != body.count("\n") * len(names):
        raise ValueError(f"{path.name} is no table with a column 'round' and as many cells in every line")
    table = np.fromiter(map(float, cells), np.float64, len(cells)).reshape(-1, len(names))
    return {name: table[:, i] for i, name in enumerate(names)}


def ending(folder: Path, planned: int, summary: Mapping[str, Any], columns: Mapping[str, Array]) -> tuple[str, str]:
    """The state and the note of a run that was to train ``planned`` rounds."""
    broken = divergence(summary, columns)
    if summary and not columns:
        return FAILED, "it came to its end, but its metrics.csv is missing"
    if summary and int(summary.get("rounds", 0)) >= planned:
        return (DIVERGED, broken) if broken else (FINISHED, "")
    where = f"after round {last_round(columns)} of {planned}"
    failure = folder / FAILURE
    if failure.is_file():
        lines = failure.read_text(errors="replace").splitlines() or ["an error without a message"]
        return FAILED, f"{where}: {lines[0]}"
    return UNFINISHED, f"{where}; {broken}" if broken else where


def divergence(summary: Mapping[str, Any], columns: Mapping[str, Array]) -> str:
    """Why a run with this summary and these columns counts as diverged; "" if it does not."""
    if not columns:
        return ""
    rounds, missing = columns["round"], np.full_like(columns["round"], np.nan)
    left_out = columns.get("train/nonfinite_clients", missing)
    if left_out[-1] > 0 and left_out[-1] == columns.get("train/clients", missing)[-1]:
        first = rounds[np.flatnonzero(~(left_out > 0))[-1] + 1] if (~(left_out > 0)).any() else rounds[0]
        return f"since round {first:.0f} some or all clients of every round sent numbers that are not finite"
    # A NaN loss looks like an empty cell: that the round was tested shows in the accuracy.
    loss = columns.get("test/loss", missing)
    tested = ~np.isnan(loss) | ~np.isnan(columns.get("test/acc", missing))
    if tested.any() and not np.isfinite(loss[tested][-1]):
        return f"the test loss of round {rounds[tested][-1]:.0f} is not finite"
    if summary.get("test/loss", 0.0) is None:  # of a regression, which has no accuracies
        return "its last test loss is not finite"
    return ""


def last_round(columns: Mapping[str, Array]) -> int:
    return int(columns["round"][-1]) if columns else 0
