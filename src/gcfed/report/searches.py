"""Hyperparameter searches: their trials, as a table and for a figure."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

from gcfed.report.tables import Table, mark_best
from gcfed.runs.folder import folders

TRIALS, RESULTS = "trials.csv", "optimization_results.yaml"


class Search(NamedTuple):
    """``trials`` has a row a trial, ``metric`` is what they are compared by; "" where no trial has a value, or an
    older version wrote the results without it."""

    trials: pd.DataFrame
    metric: str
    higher: bool


def read_searches(roots: Sequence[Path], lacks: list[str]) -> dict[Path, Search]:
    """The searches below the roots, by folder; ``lacks`` takes those that cannot be read."""
    searches = {}
    for folder in sorted({folder.resolve() for folder, files in folders(roots) if TRIALS in files}):
        try:
            trials = pd.read_csv(folder / TRIALS)
            found = yaml.safe_load((folder / RESULTS).read_text()) if (folder / RESULTS).is_file() else {}
        except (ValueError, OSError, yaml.YAMLError) as error:
            lacks.append(f"the search in {os.path.relpath(folder)} cannot be read: {error}")
            continue
        searches[folder] = Search(trials, found.get("metric", ""), found.get("direction") != "minimize")
    return searches


def trials_table(searches: Mapping[Path, Search]) -> Table | None:
    """The trials of all searches, one below the other, the best value of each whose direction is known in bold."""
    records, frames = [], []
    for folder, (trials, metric, higher) in searches.items():
        if trials.empty:
            continue
        name = os.path.relpath(folder)
        records.append(trials.assign(search=name, metric=metric))
        frame = trials.drop(columns="folder", errors="ignore").astype(object).fillna("–")
        frame = frame.map(lambda cell: f"{cell:.5g}" if isinstance(cell, float) else str(cell))
        columns = {"search": [name] + [""] * (len(frame) - 1)} | frame.to_dict("list")
        columns["value"] = mark_best(frame["value"], trials["value"], higher if metric else None)
        frames.append(pd.DataFrame(columns, dtype=object))
    if not frames:
        return None
    table = pd.concat(frames).fillna("–")
    note = "Each search's best value in bold; its optimization_results.yaml has it with all its digits."
    return Table("searches", "Searches", table, pd.concat(records), (note,))
