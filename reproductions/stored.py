"""The stored metrics of runs that a page of results cites: ``results/data/<page>/``.

``runs.yaml`` has the overrides and the commit of each run by its name, and ``<name>.csv.gz`` its
metrics by round.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pandas as pd
import yaml

DATA = Path(__file__).parent / "results" / "data"
LIMIT = 10 * 2**20  # bytes of all stored files together
RUNS = "runs.yaml"
DIGITS = 6  # significant digits of a stored number


@dataclass(frozen=True)
class StoredRun:
    """A run whose metrics are stored."""

    name: str
    overrides: tuple[str, ...]  # of ``python src/train.py``
    commit: str  # of this repository
    path: Path

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """By round; NaN where nothing was measured."""
        return pd.read_csv(self.path, index_col="round")

    def curve(self, column: str) -> pd.Series:
        """A column in the rounds that measured it."""
        return self.metrics[column].dropna()


def stored_runs(page: str) -> dict[str, StoredRun]:
    """The stored runs of a page by name; none if it has no data."""
    folder = DATA / page
    if not (folder / RUNS).is_file():
        return {}
    return _listed_runs(folder, (folder / RUNS).read_text(encoding="utf-8"))


@cache
def _listed_runs(folder: Path, listing: str) -> dict[str, StoredRun]:
    """The runs of a folder by ``runs.yaml``; the same objects again, because they keep what they
    have read.
    """
    entries = yaml.safe_load(listing)
    runs = {}
    for name, entry in entries.items():
        path = folder / f"{name}.csv.gz"
        runs[name] = StoredRun(name, tuple(entry["overrides"]), entry["commit"], path)
    return runs


def chosen(runs: Mapping[str, StoredRun], *overrides: str) -> list[StoredRun]:
    """The runs with all these overrides, in the order of their seeds. ValueError if none has."""
    found = [run for run in runs.values() if {*overrides} <= {*run.overrides}]
    if not found:
        raise ValueError(f"no stored run has {' '.join(overrides)}.")
    return sorted(found, key=seed_of)


def setting_of(run: StoredRun, key: str) -> str:
    """The value of an override. ValueError if the run has none for this key."""
    for override in run.overrides:
        own_key, _, value = override.partition("=")
        if own_key == key:
            return value
    raise ValueError(f"{run.path}: its overrides have no {key}.")


def seed_of(run: StoredRun) -> int:
    return int(setting_of(run, "seed"))


def rate_of(run: StoredRun) -> str:
    """The clients' learning rate."""
    return setting_of(run, "client.optimizer.lr")


def write_run(page: str, run: StoredRun, metrics: pd.DataFrame) -> Path:
    """Stores a run beside the others of its page; replaces one of the same name.

    The same numbers give the same bytes.
    """
    folder = DATA / page
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.name}.csv.gz"
    path.write_bytes(_compressed(metrics))
    entries = {}
    for other in stored_runs(page).values():
        entries[other.name] = {"overrides": [*other.overrides], "commit": other.commit}
    entries[run.name] = {"overrides": [*run.overrides], "commit": run.commit}
    text = yaml.safe_dump(dict(sorted(entries.items())), allow_unicode=True, width=1000)
    (folder / RUNS).write_text(text, encoding="utf-8")
    return path


def _compressed(metrics: pd.DataFrame) -> bytes:
    text = metrics.to_csv(float_format=f"%.{DIGITS}g")
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.write(text.encode())
    return packed.getvalue()


def stored_bytes() -> int:
    """The size of all stored files."""
    return sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file())
