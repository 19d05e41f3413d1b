"""The end of a run: ``summary.json`` and a printed table, or ``failure.txt``."""

from __future__ import annotations

import json
import math
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gcfed.folders.folder import FAILURE, SUMMARY
from gcfed.folders.measures import (
    CLOCK,
    DECAY,
    WINDOW,
    first_round,
    global_test,
    is_accuracy,
    smooth,
)
from gcfed.folders.reading import FEATURE_SKEW, LABEL_SKEW, column
from gcfed.utils.files import write_text
from gcfed.utils.refusal import Refusal, message_of
from gcfed.utils.stopped import Stopped

if TYPE_CHECKING:
    import pandas as pd

# of a test; less is better
ERRORS = ("test/loss", "test/perplexity", "test/rmse", "test/relative_error")
#: First parts of the columns that have rows of their own in the printed table.
USUAL = {"train", "test", "comm", "time", "personal"}
#: Which model was tested, by the beginning of the column.
MODELS = {
    "personal/global": "global model on clients' tests",
    "personal/local": "clients' own models",
}


def write_summary(folder: Path, figures: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Writes ``summary.json``: a run's figures, the hashes that identify it and its data
    (``about``), and the time.
    """
    # JSON has neither NaN nor infinity, which the losses of a diverged model may be.
    plain = dict(figures)
    for name, figure in figures.items():
        if isinstance(figure, float) and not math.isfinite(figure):
            plain[name] = None
    ended = datetime.now().astimezone().isoformat(timespec="seconds")
    plain |= {**about, "ended": ended}
    write_text(folder / SUMMARY, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def summary_of(
    metrics: pd.DataFrame, targets: Sequence[float], processes: int = 1, result: str = ""
) -> dict[str, Any]:
    """The figures of a run: accuracies in 0…1, total bytes, medians of the seconds per round and
    per client.

    ``*_to_target`` is None for a target that was not reached. ``acc_diff/*`` are statistics of the
    change from one test to the next (GC-Fed's Table 2). ``client_seconds`` is the time of one
    client in the process that trains it, aggregation included (FedGC's Table 2).

    Args:
        processes: the number of processes that trained the clients.
        result: the column that the methods declare as their result; "": the global model's test.
    """
    client_seconds = metrics["time/train_s"] * processes / metrics["train/clients"]
    return {
        "rounds": int(metrics.index[-1]),
        "result": result or global_test(metrics),
        **_accuracies(column(metrics, "test/acc")),
        **_errors(metrics),
        **_last_values(metrics, ("personal/", "privacy/")),
        **_to_targets(metrics, targets),
        "client_seconds": float(client_seconds.median()),
        "comm/down_bytes": int(metrics["comm/down_bytes"].sum()),
        "comm/up_bytes": int(metrics["comm/up_bytes"].sum()),
        "time/round_s": float(metrics["time/round_s"].median()),
        "train/nonfinite_clients": int(metrics["train/nonfinite_clients"].sum()),
    }


def _accuracies(acc: pd.Series) -> dict[str, Any]:
    """The figures of the tests' accuracies; NaN without a test."""
    change = acc.diff().dropna()
    return {
        "test/acc": _last(acc),
        "test/acc_best": float(acc.max()),
        "best_round": int(acc.idxmax()) if len(acc) else None,
        "test/acc_smooth10": _last(smooth(acc)),
        # eᵢ = 0.9·eᵢ₋₁ + 0.1·aᵢ (FedACG)
        "test/acc_ema": _last(acc.ewm(alpha=1 - DECAY, adjust=False).mean()),
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
            best[f"{name}_best"] = float(errors.min())
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
    """The figures of :func:`gcfed.folders.reading.label_skew`, for a picture and a summary."""
    hellinger, jensen_shannon = (skew[name] for name in LABEL_SKEW)
    return f"Hellinger {hellinger:.2f}, Jensen–Shannon {jensen_shannon:.2f}"


def distance_in_words(skew: Mapping[str, Any]) -> str:
    """The figure of :func:`gcfed.data.distances.feature_distance`, for a summary."""
    return f"{skew[FEATURE_SKEW]:.2f} standard deviations"


def _last(curve: pd.Series) -> float:
    return float(curve.iloc[-1]) if len(curve) else math.nan


def print_summary(
    summary: Mapping[str, Any], metrics: pd.DataFrame, folder: Path, stopped: str = ""
) -> None:
    """Prints the figures of :func:`summary_of`, other metrics and the files."""
    title = rounds_in_words(summary["rounds"])
    if stopped:
        title += f", stopped early: {stopped}"
    rows = _result(summary)
    rows |= _tests(summary, metrics)
    rows |= _personal(metrics)
    rows |= _costs(summary, metrics)
    rows |= _measured(metrics)
    table = Table(title=title, title_justify="left", show_header=False)
    for label, text in rows.items():
        table.add_row(f"[bold]{label}[/bold]", text)
    files = sorted(p.name for p in folder.iterdir() if not p.name.startswith((".", "events.out.")))
    place = Text(f"{', '.join(files)} are in\n  {min(str(folder), relpath(folder), key=len)}")
    Console(soft_wrap=True).print(table, place, sep="\n")


def rounds_in_words(rounds: int) -> str:
    """``1 round``, ``20 rounds``."""
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def shown(name: str, number: float) -> str:
    """A number of this column as text: accuracies in percent."""
    return f"{number:.2%}" if is_accuracy(name) else f"{number:.4g}"


def _result(summary: Mapping[str, Any]) -> dict[str, str]:
    """The result of a method that is not judged by the global model's test."""
    name = summary["result"]
    if name.startswith("test/"):
        return {}
    model = MODELS.get(name.rpartition("_")[0], name)
    number = summary.get(name)
    if number is not None and math.isfinite(number):
        return {"result": f"{shown(name, number)}, {model}"}
    text = f"{model}, not measured"
    if name.startswith("personal/"):
        text += " (measure it by metrics=personal data.client_test=0.2)"
    return {"result": text}


def _tests(summary: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, str]:
    """The tests of the global model."""
    rows: dict[str, str] = {}
    tests = len(column(metrics, "test/acc"))
    if tests:
        rows["global model, test accuracy"] = f"{summary['test/acc']:.2%}"
        rows["best"] = f"{summary['test/acc_best']:.2%} in round {summary['best_round']}"
    for name in ERRORS:
        if name in summary and not (tests and name == "test/loss"):
            best = f"{summary[f'{name}_best']:.4g}"
            rows[f"global model, {name}"] = f"{summary[name]:.4g}, at best {best}"
    if tests > 1:
        window = rounds_in_words(min(summary["rounds"], WINDOW))
        rows[f"mean of the last {window}"] = f"{summary['test/acc_smooth10']:.2%}"
    for target, reached in summary["rounds_to_target"].items():
        if reached:
            size = filesize.decimal(summary["bytes_to_target"][target])
            text = f"{rounds_in_words(reached)}, {size}"
            seconds = summary["seconds_to_target"].get(target)
            if seconds is not None:
                text += f", {seconds:,.4g} simulated seconds"
            rows[f"to {float(target):.0%}"] = text
    return rows


def _personal(metrics: pd.DataFrame) -> dict[str, str]:
    """A row for each model that clients tested on their own samples."""
    figures = {"acc": "", "worst10": "worst tenth ", "std": "standard deviation "}
    rows: dict[str, str] = {}
    for prefix, model in MODELS.items():
        texts = []
        for figure, words in figures.items():
            curve = column(metrics, f"{prefix}_{figure}")
            if len(curve):
                texts.append(f"{words}{curve.iloc[-1]:.2%}")
        others = [name for name in metrics if name.startswith(f"{prefix}_")]
        for name in others:
            figure = name.removeprefix(f"{prefix}_")
            curve = column(metrics, name)
            if figure not in figures and len(curve):
                texts.append(f"{figure} {curve.iloc[-1]:.4g}")
        if texts:
            rows[model] = ", ".join(texts)
    return rows


def _costs(summary: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, str]:
    """Skews, bytes, seconds, and clients that did not count."""
    rows: dict[str, str] = {}
    if LABEL_SKEW[0] in summary:
        rows["label skew"] = skew_in_words(summary)
    if FEATURE_SKEW in summary:
        rows["feature skew"] = distance_in_words(summary)
    down = filesize.decimal(summary["comm/down_bytes"])
    up = filesize.decimal(summary["comm/up_bytes"])
    rows["bytes down, up"] = f"{down}, {up}"
    rows["seconds a round, a client"] = (
        f"{summary['time/round_s']:.3f}, {summary['client_seconds']:.3g} (medians)"
    )
    for what in ("nonfinite_clients", "dropped_clients", "stragglers"):
        count = column(metrics, f"train/{what}").sum()
        if count:
            rows[what.replace("_", " ")] = f"{count:.0f}"
    return rows


def _measured(metrics: pd.DataFrame) -> dict[str, str]:
    """The last values of the columns that only some runs have: one row for each first part of their
    names.
    """
    rows = defaultdict[str, list[str]](list)
    for name in metrics:
        kind, _, figure = name.partition("/")
        curve = column(metrics, name)
        if kind not in USUAL and len(curve):
            rows[kind].append(f"{figure} {shown(name, curve.iloc[-1])}")
    return {kind: ", ".join(texts) for kind, texts in rows.items()}


@contextmanager
def failure_recorded(folder: Path, *, write: bool = True) -> Iterator[None]:
    """Deletes ``failure.txt``, and writes it if the block raises: ``Type: message``, then the
    traceback.
    """
    path = folder / FAILURE
    if write and path.is_file():
        path.unlink()
    try:
        yield
    except BaseException as error:
        if write:
            details = "".join(traceback.format_exception(error))
            # a full disk must not hide the error itself
            with suppress(OSError):
                write_text(path, f"{headline(error)}\n\n{details}")
        raise


def headline(error: BaseException) -> str:
    """An error in one line: ``Type: message``; the message alone if it says all."""
    message = message_of(error) or "no message"
    if isinstance(error, Refusal | Stopped):
        return message
    return f"{type(error).__name__}: {message}"
