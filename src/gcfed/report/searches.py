"""Hyperparameter searches: their trials, as a table and for a figure."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd

from gcfed.report.tables import Table, in_bold
from gcfed.runs.folder import Run, folders, shown
from gcfed.runs.measures import parse
from gcfed.runs.reading import FINITE, LABEL, NODES, ROUNDS, SIZE, naming, read_text, read_yaml, short
from gcfed.utils.checked import fits

TRIALS, RESULTS, STORAGE = "trials.csv", "optimization_results.yaml", "search.db"


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
            searches[folder] = _read(folder / TRIALS, folder / RESULTS)
        except ValueError as error:
            lacks.append(f"the search in {shown(folder)} cannot be read: {error}")
    return searches


def _read(path: Path, results: Path) -> Search:
    """Raises ValueError, which names the file, where a number, a value or a metric is none."""
    with naming(path):
        trials = pd.read_csv(io.StringIO(read_text(path, SIZE)))
        if lack := {"number", "value"} - {*trials}:
            raise ValueError(f"it has no column {min(lack)}")
        trials[["number", "value"]] = trials[["number", "value"]].astype(float)
        odd = ~(trials["number"].between(0, ROUNDS) & (trials["value"].isna() | (trials["value"].abs() < FINITE)))
        if odd.any() or len(trials) > NODES or len(trials.columns) > LABEL:
            raise ValueError("its numbers are not finite, or it is too large")
    found = read_yaml(results) if results.exists() else {}
    with naming(results):
        metric = found.get("metric", "")
        short("metric", metric)
        if "metric" in found:
            parse(metric or "")
        direction = fits("direction", found.get("direction"), Literal["maximize", "minimize"] | None)
    return Search(trials.astype({"number": int}), metric, direction != "minimize")


def search_of(run: Run) -> Path | None:
    """The folder of the search that the run is a trial of, or one of a trial's seeds."""
    above = run.folder.parents[:2]
    return next((folder for folder in above if (folder / TRIALS).exists() or (folder / STORAGE).exists()), None)


def trials_table(searches: Mapping[Path, Search]) -> Table | None:
    """The trials of all searches, one below the other, the best value of each whose direction is known in bold."""
    parts = []
    for folder, search in searches.items():
        about = {
            "search": shown(folder),
            "metric": search.metric,
            "higher": search.higher if search.metric else None,
            "rank": search.trials["value"],
        }
        parts += [search.trials.astype(object).assign(**about)] if len(search.trials) else []
    if not parts:
        return None
    lines = pd.concat(parts, ignore_index=True)
    texts = lines.drop(columns=["folder", "metric", "higher", "rank", "search"], errors="ignore").fillna("–")
    texts = texts.map(lambda cell: f"{cell:.5g}" if isinstance(cell, float) else str(cell)).astype(object)
    texts["value"] = in_bold(lines.assign(text=texts["value"]), ["search"])
    texts.insert(0, "search", lines["search"].mask(lines["search"] == lines["search"].shift(), ""))
    note = "Each search's best value in bold; its optimization_results.yaml has it with all its digits."
    return Table("searches", "Searches", texts, lines.drop(columns=["higher", "rank"]), [note])
