"""The figures of a run, for ``summary.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcfed.data.distances import FEATURE_SKEW, LABEL_SKEW
from gcfed.folders.columns import ERRORS, SUMMARY_STATISTICS, global_test, is_accuracy
from gcfed.folders.folder import SUMMARY
from gcfed.folders.measures import CLOCK, DECAY, STATISTICS, finite, first_round, smooth
from gcfed.folders.reading import column
from gcfed.utils.files import write_text

if TYPE_CHECKING:
    import pandas as pd


def write_summary(folder: Path, figures: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Writes ``summary.json``: a run's figures, the hashes that identify it and its data
    (``about``), and the time.
    """
    ended = datetime.now().astimezone().isoformat(timespec="seconds")
    text = as_json({**figures, **about, "ended": ended}, indent=2)
    write_text(folder / SUMMARY, text + "\n")


def as_json(figures: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Figures as JSON.

    JSON has neither NaN nor infinity, which the losses of a diverged model may be: they are null.
    """
    plain = dict(figures)
    for name, figure in figures.items():
        if isinstance(figure, float) and not math.isfinite(figure):
            plain[name] = None
    return json.dumps(plain, indent=indent, allow_nan=False)


def summary_of(
    metrics: pd.DataFrame,
    targets: Sequence[float],
    processes: Mapping[int, int] | None = None,
    result: str = "",
) -> dict[str, Any]:
    """The figures of a run: accuracies in 0…1, total bytes, medians of the seconds per round and
    per client.

    ``*_to_target`` is None for a target that was not reached. ``acc_diff/*`` are statistics of the
    change from one test to the next (GC-Fed's Table 2). ``client_seconds`` is the time of one
    client in the process that trains it, aggregation included (FedGC's Table 2).

    Args:
        processes: a round → the number of processes that trained clients from then on, until the
            next entry. Rounds before the first entry count in no ``client_seconds``. None: one
            process.
        result: the column that the methods declare as their result; "": the global model's test.
    """
    return {
        "rounds": int(metrics.index[-1]),
        "result": result or global_test(metrics),
        **_accuracies(column(metrics, "test/acc")),
        **_errors(metrics),
        **_last_values(metrics, ("personal/", "privacy/")),
        **_to_targets(metrics, targets),
        **_costs(metrics, {1: 1} if processes is None else processes),
    }


def _costs(metrics: pd.DataFrame, processes: Mapping[int, int]) -> dict[str, float]:
    """Seconds, bytes, and updates that did not count."""
    import pandas as pd

    at_once = pd.Series(processes, dtype=float).reindex(metrics.index, method="ffill")
    clients = metrics["train/clients"].replace(0, math.nan)  # a round without clients has no time
    client_seconds = metrics["time/train_s"] * at_once / clients
    costs: dict[str, float] = {"client_seconds": float(client_seconds.median())}
    for name, statistic in SUMMARY_STATISTICS.items():
        number = STATISTICS[statistic](metrics[name])
        costs[name] = int(number) if statistic == "total" else float(number)
    return costs


def _accuracies(acc: pd.Series) -> dict[str, Any]:
    """The figures of the tests' accuracies; NaN without a test."""
    # eᵢ = 0.9·eᵢ₋₁ + 0.1·aᵢ (FedACG)
    average = acc.ewm(alpha=1 - DECAY, adjust=False).mean()
    change = acc.diff().dropna()
    tests = finite(acc)
    return {
        "test/acc": _last(acc),
        "test/acc_best": float(tests.max()),
        "best_round": int(tests.idxmax()) if len(tests) else None,
        "test/acc_smooth10": _last(smooth(acc)),
        "test/acc_ema": _last(average),
        "acc_diff/mean": float(change.mean()),
        "acc_diff/std": float(change.std(ddof=0)),
        "acc_diff/min": float(change.min()),
    }


def _errors(metrics: pd.DataFrame) -> dict[str, float]:
    """The last and the lowest value of each test measure of which less is better."""
    last = {}
    best = {}
    for name in ERRORS:
        if name in metrics:
            errors = column(metrics, name)
            last[name] = _last(errors)
            best[f"{name}_best"] = float(finite(errors).min())
    return last | best


def _last_values(metrics: pd.DataFrame, prefixes: tuple[str, ...]) -> dict[str, float]:
    """The last values of the columns with these prefixes."""
    return {name: _last(column(metrics, name)) for name in metrics if name.startswith(prefixes)}


def _to_targets(metrics: pd.DataFrame, targets: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Rounds, simulated seconds and bytes until the accuracy reached each target, or None."""
    acc = column(metrics, "test/acc")
    clock = column(metrics, CLOCK)
    traffic = (metrics["comm/down_bytes"] + metrics["comm/up_bytes"]).astype("int64").cumsum()
    rounds = {f"{target:g}": first_round(acc, target) for target in targets}
    seconds: dict[str, float | None] = {}
    sizes: dict[str, int | None] = {}
    for target, reached in rounds.items():
        sizes[target] = None if reached is None else int(traffic[reached])
        if len(clock):
            seconds[target] = None if reached is None else float(clock[reached])
    return {
        "rounds_to_target": rounds,
        "seconds_to_target": seconds,
        "bytes_to_target": sizes,
    }


def skew_in_words(skew: Mapping[str, Any]) -> str:
    """The figures of :func:`gcfed.data.distances.label_skew`, for a picture and a summary."""
    hellinger, jensen_shannon = LABEL_SKEW
    return f"Hellinger {skew[hellinger]:.2f}, Jensen–Shannon {skew[jensen_shannon]:.2f}"


def distance_in_words(skew: Mapping[str, Any]) -> str:
    """The figure of :func:`gcfed.data.distances.feature_distance`, for a summary."""
    return f"{skew[FEATURE_SKEW]:.2f} standard deviations"


def _last(curve: pd.Series) -> float:
    return float(curve.iloc[-1]) if len(curve) else math.nan


def rounds_in_words(rounds: int) -> str:
    """``1 round``, ``20 rounds``."""
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def formatted(name: str, number: float) -> str:
    """A number of this column as text: accuracies in percent."""
    return f"{number:.2%}" if is_accuracy(name) else f"{number:.4g}"
