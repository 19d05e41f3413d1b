"""Run folders: reads them, and finds out how each run ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcfed.folders.columns import GLOBAL_TESTS
from gcfed.folders.identity import digest, leaves
from gcfed.folders.reading import (
    FEATURE_SKEW,
    LABEL_SKEW,
    column,
    read_metrics,
    read_summary,
    read_yaml,
)
from gcfed.utils.refusal import MissingFile, message_of
from gcfed.utils.resolvers import LOGS

if TYPE_CHECKING:
    import pandas as pd
    from pydantic import TypeAdapter

# Files of a run.
CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.csv"
FAILURE = "failure.txt"
CHECKPOINT = Path("checkpoints") / "last.ckpt"
EXPORT = Path("global_model.safetensors")
# Files of a search.
TRIALS = "trials.csv"
RESULTS = "optimization_results.yaml"
STORAGE = "search.db"
# States of a run.
FINISHED = "finished"
DIVERGED = "diverged"  # see divergence()
FAILED = "failed"  # an error or a signal ended it
UNFINISHED = "unfinished"  # it was killed or is running
STATES = (FINISHED, DIVERGED, FAILED, UNFINISHED)


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder."""

    folder: Path
    config: Mapping[str, Any]  # {} if it cannot be read
    summary: Mapping[str, Any]  # {} if the run has not ended
    metrics: pd.DataFrame  # by round, NaN where nothing was measured
    state: str  # one of STATES
    note: str  # why it is in this state; "" for a finished run

    @cached_property
    def leaves(self) -> dict[str, Any]:
        return leaves(self.config)

    @cached_property
    def identity(self) -> str:
        return digest(self.leaves)

    @property
    def seed(self) -> int:
        return self.config.get("seed", 0)

    @property
    def planned(self) -> int:
        """The number of rounds in the config."""
        return self.config.get("rounds", 0)

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
        return int(self.metrics.index[-1]) if len(self.metrics) else 0

    @property
    def result(self) -> str:
        """The column that the run's methods declare as their result; "" for the global model's
        test.
        """
        column = self.summary.get("result") or ""
        return "" if column in GLOBAL_TESTS else column

    @property
    def has_ended(self) -> bool:
        return self.state in (FINISHED, DIVERGED)

    def get(self, key: str, default: Any = None) -> Any:
        """The config's value at a dotted key."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part, default) if isinstance(node, Mapping) else default
        return node

    def curve(self, name: str) -> pd.Series:
        """A column of the metrics in the rounds that measured it; empty if none did.

        Infinities stay.
        """
        return column(self.metrics, name)


def find_runs(roots: Iterable[str | Path]) -> list[Run]:
    """Every run below the roots, sorted by path.

    Folders within a run are left out, and so are links.
    """
    folders = set[str]()
    for root in map(Path, roots):
        if not root.is_dir():
            raise MissingFile(
                f"roots={root}: there is no such folder. Runs are in {LOGS} by default."
            )
        for name, below, files in os.walk(root):
            if _has_run(files):
                folders.add(os.path.realpath(name))
                below.clear()
    return [read_run(Path(folder)) for folder in sorted(folders)]


def _has_run(files: Sequence[str]) -> bool:
    """Whether these files of a folder belong to a run that was accepted."""
    if CONFIG not in files:
        return False
    return any(name in files for name in ("partition.npz", METRICS, SUMMARY, FAILURE))


def read_run(folder: Path) -> Run:
    """Reads one folder. If a file cannot be read, the run counts as failed and has no config."""
    try:
        config = read_yaml(folder / CONFIG)
        summary = read_summary(folder / SUMMARY)
        metrics = read_metrics(folder / METRICS)
        _check_types(config, summary)
        state, note = ending(folder, config["rounds"], summary, metrics)
        run = Run(folder, config, summary, metrics, state, note)
        run.identity  # noqa: B018  # raises if a value has no text
    except Exception as error:  # a damaged or foreign folder
        why = message_of(f"{type(error).__name__}: {error}")[:500]
        return Run(folder, {}, {}, read_metrics(None), FAILED, f"its files cannot be read: {why}")
    return run


def _check_types(config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Raises Refusal if a value that reports compute with is of another type."""
    from gcfed.utils.checked import validated  # late: Hydra asks for folders at its start

    for key, kind in _types_in_config().items():
        validated(key, config.get(key), kind)
    for key, kind in _types_in_summary().items():
        validated(f"{key} in {SUMMARY}", summary.get(key), kind)


@cache
def _types_in_config() -> dict[str, TypeAdapter]:
    from gcfed.utils.checked import Number, Whole, rule

    return {
        "rounds": rule(Whole),
        "seed": rule(Whole | None),
        "eval_every": rule(Whole | None),
        "targets": rule(Sequence[Number] | None),
    }


@cache
def _types_in_summary() -> dict[str, TypeAdapter]:
    from gcfed.utils.checked import Number, Whole, rule

    texts = dict.fromkeys(("data", "ended", "result", "stopped", "version"), rule(str | None))
    skews = dict.fromkeys((*LABEL_SKEW, FEATURE_SKEW), rule(Number | None))
    return {"rounds": rule(Whole | None), **texts, **skews}


def ending(
    folder: Path, planned: int, summary: Mapping[str, Any], metrics: pd.DataFrame
) -> tuple[str, str]:
    """The state and the note of a run of ``planned`` rounds."""
    if summary and metrics.empty:
        return FAILED, f"it has ended, but its {METRICS} is missing"
    broken = divergence(metrics)
    rounds = 0 if metrics.empty else int(metrics.index[-1])
    if _has_ended(summary, planned, rounds):
        return (DIVERGED, broken) if broken else (FINISHED, "")
    where = f"after round {rounds} of {planned}"
    failure = folder / FAILURE
    if failure.is_file():
        lines = failure.read_text(encoding="utf-8", errors="replace").splitlines()
        message = lines[0][:1000] if lines else "an error without a message"
        return FAILED, f"{where}: {message}"
    return UNFINISHED, f"{where}; {broken}" if broken else where


def _has_ended(summary: Mapping[str, Any], planned: int, rounds: int) -> bool:
    """Whether the summary is that of the whole run, which has finished so many rounds."""
    if not summary:
        return False
    if summary.get("rounds", 0) >= planned:
        return True
    # A run that stopped early may have been continued.
    return "stopped" in summary and summary.get("rounds", rounds) == rounds


def divergence(metrics: pd.DataFrame) -> str:
    """Why a run with these metrics counts as diverged; "" if it does not."""
    if metrics.empty:
        return ""
    last = metrics.iloc[-1]
    if 0 < last.get("train/nonfinite_clients", 0) == last.get("train/clients"):
        return f"no client of round {last.name} sent finite numbers"
    losses = column(metrics, "test/loss")
    if len(losses) and abs(losses.iloc[-1]) == float("inf"):
        return f"the test loss of round {losses.index[-1]} is not finite"
    return ""
