"""Run folders: reads them, and finds out how each run ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gcfed.folders.columns import GLOBAL_TESTS, is_summary_number
from gcfed.folders.identity import digest, leaves
from gcfed.folders.reading import column, read_metrics, read_summary, read_yaml
from gcfed.utils.refusal import MissingFile, Refusal, message_of
from gcfed.utils.resolvers import LOGS
from gcfed.utils.stopped import tells_of_signal

if TYPE_CHECKING:
    import pandas as pd
    from pydantic import TypeAdapter

Values = Mapping[str, Any]  # of a config or a summary, by key
# Files of a run.
CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.csv"
FAILURE = "failure.txt"
CHECKPOINT = Path("checkpoints") / "last.ckpt"
EXPORT = Path("global_model.safetensors")
ACCEPTED = frozenset((METRICS, SUMMARY, FAILURE, "partition.npz"))  # one of a run that was accepted
# Files of a search.
TRIALS = "trials.csv"
RESULTS = "optimization_results.yaml"
STORAGE = "search.db"
# States of a run.
FINISHED = "finished"
DIVERGED = "diverged"  # see divergence()
FAILED = "failed"  # an error ended it
INTERRUPTED = "interrupted"  # Ctrl-C or SIGTERM ended it
UNFINISHED = "unfinished"  # it was killed or is running
STATES = (FINISHED, DIVERGED, FAILED, INTERRUPTED, UNFINISHED)
#: Sections of a config that a report reads.
SECTIONS = ("gc", "labels", "methods", "participation", "partition", "tags")
COLUMN = r"^[^:@<>\[\]]*$"  # a column that a measure can name; "": none


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder."""

    folder: Path
    config: Values  # {} if it cannot be read
    summary: Values  # {} if the run has not ended
    metrics: pd.DataFrame  # by round, NaN where nothing was measured
    state: str  # one of STATES
    reason: str  # why it is in this state; "" for a finished run

    @cached_property
    def leaves(self) -> dict[str, Any]:
        return leaves(self.config)

    @cached_property
    def identity(self) -> str:
        return digest(self.leaves)

    @property
    def seed(self) -> int:
        return self.config.get("seed") or 0

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
        return _value_at(self.config, key, default)

    def curve(self, name: str) -> pd.Series:
        """A column of the metrics in the rounds that measured it; empty if none did.

        Infinities stay.
        """
        return column(self.metrics, name)


def _value_at(config: Values, key: str, default: Any = None) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part, default) if isinstance(node, Mapping) else default
    return node


def find_runs(roots: Iterable[str | Path]) -> list[Run]:
    """Every run below the roots, sorted by path.

    Folders within a run are left out, and so are links.
    """
    folders = set[str]()
    for given in roots:
        root = Path(given).expanduser()
        if not root.is_dir():
            raise MissingFile(
                f"roots={root}: there is no such folder. Runs are in {LOGS} by default."
            )
        for name, below, files in os.walk(root):
            if CONFIG in files and not ACCEPTED.isdisjoint(files):
                folders.add(os.path.realpath(name))
                below.clear()
    return [read_run(Path(folder)) for folder in sorted(folders)]


def read_run(folder: Path) -> Run:
    """Reads one folder. If a file cannot be read, the run counts as failed and has no config."""
    try:
        config = read_yaml(folder / CONFIG)
        summary = read_summary(folder / SUMMARY)
        metrics = read_metrics(folder / METRICS)
        _check_types(config, summary)
        state, reason = ending(folder, config["rounds"], summary, metrics)
        run = Run(folder, config, summary, metrics, state, reason)
        run.identity  # noqa: B018  # raises if a value has no text
        _check_classes(run.leaves)
    except Exception as error:  # a damaged or foreign folder
        kind = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
        why = message_of(f"{kind}{error}")[:500]
        return Run(folder, {}, {}, read_metrics(None), FAILED, f"its files cannot be read: {why}")
    return run


def _check_types(config: Values, summary: Values) -> None:
    """Raises Refusal if a value that a report reads is of another type."""
    from gcfed.utils.checked import rule, validated  # late: Hydra asks for folders at its start

    for key, kind in _types_in_config().items():
        validated(key, _value_at(config, key), kind)
    for key, kind in _types_in_summary().items():
        validated(f"{key} in {SUMMARY}", summary.get(key), kind)
    finite = rule(float | None)
    for key in filter(is_summary_number, summary):
        validated(f"{key} in {SUMMARY}", summary[key], finite)


def _check_classes(leaves: Values) -> None:
    """Raises Refusal if the name of a class is no text."""
    from gcfed.utils.checked import rule, validated

    text = rule(str)
    for key, value in leaves.items():
        section, is_class, below = key.partition("_target_")
        if is_class:  # a key below _target_ shows that there are keys in place of a name
            validated(section + is_class, {below: value} if below else value, text)


@cache
def _types_in_config() -> dict[str, TypeAdapter]:
    """By dotted key; sections come before their keys."""
    from gcfed.utils.checked import Number, Whole, rule

    sections = dict.fromkeys(SECTIONS, rule(dict[Any, Any] | None))
    names = {}
    for section in ("labels", "tags"):
        for kind in ("algorithm", "data", "gc", "model"):
            names[f"{section}.{kind}"] = rule(str | None)
    return {
        **sections,
        **names,
        "rounds": rule(Whole),
        "seed": rule(Whole | None),
        "eval_every": rule(Whole | None),
        "targets": rule(Sequence[Number] | None),
        "participation.num_clients": rule(Whole | None),
        "participation.per_round": rule(Number | None),
    }


@cache
def _types_in_summary() -> dict[str, TypeAdapter]:
    from pydantic import Field

    from gcfed.utils.checked import Whole, rule

    texts = dict.fromkeys(("data", "ended", "stopped", "version"), rule(str | None))
    column = Annotated[str, Field(pattern=COLUMN)]
    return {"rounds": rule(Whole | None), "result": rule(column | None), **texts}


def ending(folder: Path, planned: int, summary: Values, metrics: pd.DataFrame) -> tuple[str, str]:
    """The state and the reason of a run of ``planned`` rounds."""
    if summary and metrics.empty:
        return FAILED, f"it has ended, but its {METRICS} is missing"
    broken = divergence(metrics)
    rounds = 0 if metrics.empty else int(metrics.index[-1])
    if _has_ended(summary, planned, rounds):
        lost = lost_rows(metrics, summary.get("rounds") or rounds)
        if lost:
            return FAILED, lost
        return (DIVERGED, broken) if broken else (FINISHED, "")
    where = f"after round {rounds} of {planned}"
    failure = folder / FAILURE
    if failure.is_file():
        lines = failure.read_text(encoding="utf-8", errors="replace").splitlines()
        message = lines[0][:1000] if lines else "an error without a message"
        state = INTERRUPTED if tells_of_signal(message) else FAILED
        return state, f"{where}: {message}"
    return UNFINISHED, f"{where}; {broken}" if broken else where


def lost_rows(metrics: pd.DataFrame, rounds: int) -> str:
    """Which of these rounds have no row; "" if each has one."""
    present = {*metrics.index.tolist()}
    for number in range(1, rounds + 1):
        if number not in present:
            return f"it has ended after round {rounds}, but {METRICS} lacks round {number}"
    return ""


def _has_ended(summary: Values, planned: int, rounds: int) -> bool:
    """Whether the summary is that of the whole run, which has finished so many rounds."""
    if not summary:
        return False
    if (summary.get("rounds") or 0) >= planned:
        return True
    # A run that stopped early may have been continued.
    return "stopped" in summary and summary.get("rounds") in (None, rounds)


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


def mixed_versions(runs: Iterable[Run]) -> str:
    """What to say of runs that different versions have trained; "" if none differ.

    Runs of which no one has recorded a version count as equal.
    """
    folders: dict[str, Path] = {}  # a version → a run
    for run in runs:
        if run.summary:
            folders.setdefault(str(run.summary.get("version") or "not recorded"), run.folder)
    if len(folders) < 2:
        return ""
    listed = "; ".join(f"{version}: {folder}" for version, folder in sorted(folders.items()))
    return (
        f"runs of different versions are compared ({listed}). CHANGELOG.md lists the numbers that"
        " change between versions. Train the older ones again"
    )
