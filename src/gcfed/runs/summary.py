"""``summary.json``: the figures of a run that has come to its end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcfed.runs.folder import SUMMARY
from gcfed.runs.measures import average, first_round, smooth, until
from gcfed.runs.metrics_csv import column
from gcfed.utils.files import replacing

if TYPE_CHECKING:
    import pandas as pd

ERRORS = ("test/loss", "test/rmse", "test/relative_error")  # of a test, beside the accuracy: the less, the better


def write_summary(folder: Path, figures: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Writes ``summary.json``: a run's figures, what identifies it and its data (``about``), and when it ended."""
    # JSON has neither NaN nor infinity, the loss of a model that diverged.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
    plain |= {**about, "ended": datetime.now().astimezone().isoformat(timespec="seconds")}
    with replacing(folder / SUMMARY) as temporary:
        temporary.write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")


def summary_of(metrics: pd.DataFrame, targets: Sequence[float], processes: int = 1) -> dict[str, Any]:
    """The figures of a run: accuracies in 0…1, bytes in all, seconds a round and a client (medians).

    The clients were shared out among ``processes``.

    A target that was not reached has None; ``_ema`` reads the moving average (FedACG's tables), the other the tests
    themselves. ``acc_diff/*`` are statistics of the change from one test to the next (GC-Fed's Table 2).
    ``client_seconds`` and ``*_to_target`` are FedGC's Table 2: what a client's share of a round takes the process that
    trains it, aggregation included, and such seconds and the bytes in both directions, of all clients together, in all
    rounds up to the first that reached the target.
    """
    acc = column(metrics, "test/acc")
    moving, change = average(acc), acc.diff().dropna()
    errors = {name: column(metrics, name) for name in ERRORS if name in metrics}
    reached = {f"{t:g}": first_round(acc, t) for t in targets}
    seconds = metrics["time/train_s"] * processes
    traffic = (metrics["comm/down_bytes"] + metrics["comm/up_bytes"]).astype("int64")
    return {
        "rounds": int(metrics.index[-1]),
        "test/acc": _last(acc),
        "test/acc_best": float(acc.max()),
        "best_round": int(acc.idxmax()) if len(acc) else None,
        "test/acc_smooth10": _last(smooth(acc)),
        "test/acc_ema": _last(moving),
        "acc_diff/mean": float(change.mean()),
        "acc_diff/std": float(change.std(ddof=0)),
        "acc_diff/min": float(change.min()),
        **{name: _last(error) for name, error in errors.items()},
        **{f"{name}_best": float(error.min()) for name, error in errors.items()},
        "rounds_to_target": reached,
        "rounds_to_target_ema": {f"{t:g}": first_round(moving, t) for t in targets},
        "bytes_to_target": {t: until(traffic, r) for t, r in reached.items()},
        "client_seconds": float((seconds / metrics["train/clients"]).median()),
        "client_seconds_to_target": {t: until(seconds, r) for t, r in reached.items()},
        "comm/down_bytes": int(metrics["comm/down_bytes"].sum()),
        "comm/up_bytes": int(metrics["comm/up_bytes"].sum()),
        "time/round_s": float(metrics["time/round_s"].median()),
        "train/nonfinite_clients": int(metrics["train/nonfinite_clients"].sum()),
    }


def last_figures(summary: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, float]:
    """What a comparison of runs shows beside the ends of their curves: those figures of the summary that are no curve.

    ``test/rounds_to_<t>`` and ``test/rounds_to_<t>_ema`` are there for the targets that were reached.
    """
    figures = {name: value for name, value in summary.items() if name.startswith("test/")}
    for key, end in (("rounds_to_target", ""), ("rounds_to_target_ema", "_ema")):
        figures |= {f"test/rounds_to_{t}{end}": r for t, r in summary[key].items() if r is not None}
    return {name: float(v) for name, v in figures.items() if name not in metrics and math.isfinite(v)}


def _last(curve: pd.Series) -> float:
    return float(curve.iloc[-1]) if len(curve) else math.nan
