"""Hyperparameter searches: their trials, as a table and for a figure."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from gcfed.report.tables import Table, mark_best
from gcfed.runs.folder import folders, shown
from gcfed.runs.measures import parse
from gcfed.runs.metrics_csv import SIZE
from gcfed.runs.reading import FINITE, LABEL, NODES, ROUNDS, naming, read_text, read_yaml, short
from gcfed.utils.checked import fits

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
            searches[folder] = read_search(folder)
        except ValueError as error:
            lacks.append(f"the search in {shown(folder)} cannot be read: {error}")
    return searches


def read_search(folder: Path) -> Search:
    """One folder.

    Raises:
        ValueError: its trials are no table with number and value, or its results no metric; names the file.
    """
    with naming(folder / TRIALS):
        trials = pd.read_csv(io.StringIO(read_text(folder / TRIALS, SIZE)))
        if lack := {"number", "value"} - {*trials}:
            raise ValueError(f"it has no column {min(lack)}")
        trials[["number", "value"]] = trials[["number", "value"]].astype(float)
        odd = ~(trials["number"].between(0, ROUNDS) & (trials["value"].isna() | (trials["value"].abs() < FINITE)))
        if odd.any() or len(trials) > NODES or len(trials.columns) > LABEL:
            raise ValueError("its numbers are not finite, or it is too large")
    found = read_yaml(folder / RESULTS, check_results) if (folder / RESULTS).exists() else {}
    return Search(trials.astype({"number": int}), found.get("metric", ""), found.get("direction") != "minimize")


def check_results(results: Mapping[str, Any]) -> None:
    """Refuses ``optimization_results.yaml`` with what is no metric."""
    if "metric" in results:
        short("metric", results["metric"])
        parse(results["metric"] or "")
        fits("direction", results.get("direction"), Literal["maximize", "minimize"] | None)


def trials_table(searches: Mapping[Path, Search]) -> Table | None:
    """The trials of all searches, one below the other, the best value of each whose direction is known in bold."""
    records, frames = [], []
    for folder, (trials, metric, higher) in searches.items():
        if trials.empty:
            continue
        name = shown(folder)
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
