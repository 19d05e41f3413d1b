"""Hyperparameter searches: a ``trials.csv`` a search, a line a trial."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from gcfed.report.runs import Loader, folders, is_run

TRIALS, BEST = "trials.csv", "optimization_results.yaml"
_FIXED = ("number", "state", "value", "seconds", "folder")


@dataclass(frozen=True)
class Trial:
    """One line. ``value`` and ``seconds`` are None where the trial has none, ``folder`` "" likewise."""

    number: int
    state: str
    value: float | None
    seconds: float | None
    folder: str
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Search:
    """The name of the folder of a ``trials.csv``, and its trials by number.

    ``best`` is the number of the best one, which the search knows; None where it has not written that.
    """

    name: str
    trials: tuple[Trial, ...]
    best: int | None = None


def find_searches(roots: Iterable[str | Path]) -> list[Search]:
    """Every search below the folders, by path.

    Raises:
        FileNotFoundError: a root is not there.
        ValueError: a ``trials.csv`` cannot be read; names it.
    """
    found = {folder.resolve() for folder, files in folders(roots) if TRIALS in files and not is_run(files)}
    return [Search(folder.name, _trials(folder / TRIALS), _best(folder / BEST)) for folder in sorted(found)]


def _best(path: Path) -> int | None:
    try:
        return int(yaml.load(path.read_text(encoding="utf-8"), Loader)["best_trial"])
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return None


def _trials(path: Path) -> tuple[Trial, ...]:
    """Columns beside ``number,state,value,seconds,folder`` are parameters, those of the trial where not empty."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        trials = [
            Trial(
                int(row["number"]),
                row["state"],
                _number(row["value"]),
                _number(row["seconds"]),
                row["folder"],
                {name: text for name, text in row.items() if name not in _FIXED and text},
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no list of trials ({','.join(_FIXED)},…): {error!r}.") from None
    return tuple(sorted(trials, key=lambda trial: trial.number))


def _number(text: str) -> float | None:
    number = float(text) if text else math.nan
    return number if math.isfinite(number) else None
