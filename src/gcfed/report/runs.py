"""Run folders as the report sees them: config, overrides, summary, curves, and how each run ended."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    found: set[Path] = set()
    for root in map(Path, roots):
        if not root.is_dir():
            raise FileNotFoundError(
                f"roots={root}: there is no such folder. Runs lie in logs/, or where hydra.run.dir put them."
            )
        for name, below, files in os.walk(root, followlinks=True):
            if "config.yaml" in files and OVERRIDES in files:
                found.add(Path(name).resolve())
                below.clear()  # no run holds another; its checkpoints and events are many
            below[:] = [b for b in below if not b.startswith(".")]
    return [read_run(folder) for folder in sorted(found)]


def read_run(folder: Path) -> Run:
    """Reads one folder. A file that cannot be read makes the run a failed one, with the reason, never an error."""
    config: Any = {}
    overrides: Any = ()
    try:
        config = yaml.load((folder / "config.yaml").read_text(), Loader) or {}
        overrides = tuple(map(str, yaml.load((folder / OVERRIDES).read_text(), Loader) or ()))
        summary = folder / "summary.json"
        result = json.loads(summary.read_text()) if summary.is_file() else {}
        columns = read_columns(folder / "metrics.csv")
        planned = int(config["rounds"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        config = config if isinstance(config, Mapping) else {}
        reason = f"its files cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
        return Run(folder, config, overrides, {}, {}, FAILED, reason)
    return Run(folder, config, overrides, result, columns, *ending(folder, planned, result, columns))


def read_columns(path: Path) -> dict[str, Array]:
    """A ``metrics.csv`` by column; a last line that a kill cut short is left out."""
    if not path.is_file():
        return {}
    text = path.read_text()
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    if len(lines) < 2:
        return {}
    header, *rows = csv.reader(lines)
    table = np.array([[float(cell) if cell else math.nan for cell in row] for row in rows], dtype=np.float64)
    return {name: table[:, i] for i, name in enumerate(header)}


def ending(folder: Path, planned: int, summary: Mapping[str, Any], columns: Mapping[str, Array]) -> tuple[str, str]:
    """The state and the note of a run that was to train ``planned`` rounds."""
    broken = divergence(columns)
    if summary and int(summary.get("rounds", 0)) >= planned:
        return (DIVERGED, broken) if broken else (FINISHED, "")
    where = f"after round {last_round(columns)} of {planned}"
    failure = folder / FAILURE
    if failure.is_file():
        lines = failure.read_text(errors="replace").splitlines() or ["an error without a message"]
        return FAILED, f"{where}: {lines[0]}"
    return UNFINISHED, f"{where}; {broken}" if broken else where


def divergence(columns: Mapping[str, Array]) -> str:
    """Why a run with these columns counts as diverged; "" if it does not."""
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
    return ""


def last_round(columns: Mapping[str, Array]) -> int:
    return int(columns["round"][-1]) if columns else 0
