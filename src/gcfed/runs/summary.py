"""What a run tells and leaves: its config as it begins, ``summary.json`` at its end, or ``failure.txt``."""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gcfed.runs.folder import FAILURE, SUMMARY, shown
from gcfed.runs.measures import WINDOW, average, first_round, smooth, until
from gcfed.runs.reading import column
from gcfed.utils.files import replacing
from gcfed.utils.words import size

if TYPE_CHECKING:
    import pandas as pd

ERRORS = ("test/loss", "test/rmse", "test/relative_error")  # of a test, beside the accuracy: the less, the better
USUAL = {"train", "test", "val", "comm", "time"}  # first parts of the columns that every run has


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


def tell(*parts: RenderableType) -> None:
    """To the terminal and, without colours, to the files of the log."""
    console = Console(soft_wrap=True, record=True)
    console.print(*parts, sep="\n")
    record = logging.makeLogRecord({"msg": console.export_text().rstrip(), "levelno": logging.INFO})
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def print_config(cfg: DictConfig) -> None:
    """The composed config as a tree, a branch a section."""
    from rich.syntax import Syntax
    from rich.tree import Tree

    tree = Tree("config")
    for key, node in OmegaConf.to_container(cfg, resolve=True).items():  # type: ignore[union-attr]
        tree.add(Syntax(OmegaConf.to_yaml({key: node}).rstrip(), "yaml", background_color="default", word_wrap=True))
    tell(tree)


def print_summary(summary: Mapping[str, Any], metrics: pd.DataFrame, folder: Path, stopped: str = "") -> None:
    """The figures of :func:`gcfed.runs.summary.summary_of`, what was measured beside, and what lies in the folder."""
    title = f"{summary['rounds']} rounds" + f", stopped early: {stopped}" * bool(stopped)
    table = Table(title=title, title_justify="left", show_header=False)
    for label, text in {**_figures(summary, metrics), **_measured(metrics)}.items():
        table.add_row(f"[bold]{label}[/bold]", text)
    files = sorted(p.name for p in folder.iterdir() if not p.name.startswith((".", "events.out.")))
    tell(table, Text(f"{', '.join(files)} are in\n  {min(str(folder), shown(folder), key=len)}"))


def _figures(summary: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, str]:
    rows: dict[str, str] = {}
    tests = len(column(metrics, "test/acc"))
    if tests == 0:
        rows |= {n: f"{summary[n]:.4g}, at best {summary[f'{n}_best']:.4g}" for n in ERRORS if n in summary}
    else:
        rows["test accuracy, last round"] = f"{summary['test/acc']:.2%}"
        rows["best"] = f"{summary['test/acc_best']:.2%} in round {summary['best_round']}"
    if tests > 1:
        rows[f"mean of the last {min(summary['rounds'], WINDOW)} rounds"] = f"{summary['test/acc_smooth10']:.2%}"
    if len(validated := column(metrics, "val/acc")):
        rows["validation accuracy, last round"] = f"{validated.iloc[-1]:.2%}"
    sent, seconds = summary["bytes_to_target"], summary["client_seconds_to_target"]
    for t, reached in summary["rounds_to_target"].items():
        if reached:
            rows[f"to {float(t):.0%}"] = f"{reached} rounds, {size(sent[t])}, {seconds[t]:.3g} s of clients"
    rows["bytes down, up"] = f"{size(summary['comm/down_bytes'])}, {size(summary['comm/up_bytes'])}"
    rows["seconds a round (median)"] = f"{summary['time/round_s']:.3f}"
    rows["seconds a client's round"] = f"{summary['client_seconds']:.3g}"
    if count := summary["train/nonfinite_clients"]:
        rows["client updates left out"] = f"{count} (not finite)"
    lost, slow = (column(metrics, f"train/{kind}").sum() for kind in ("dropped_clients", "stragglers"))
    if lost or slow:
        rows["clients lost, slow"] = f"{lost:.0f}, {slow:.0f}"
    return rows


def _measured(metrics: pd.DataFrame, most: int = 8) -> dict[str, str]:
    """The last values of what ``metrics=…`` asked for, a row a metric."""
    values: dict[str, list[str]] = defaultdict(list)
    for name in metrics:
        kind, _, figure = name.partition("/")
        if kind not in USUAL and len(curve := column(metrics, name)):
            values[kind].append(f"{figure} {curve.iloc[-1]:.4g}")
    return {kind: ", ".join(found[:most]) + ", …" * (len(found) > most) for kind, found in values.items()}


@contextmanager
def failure_recorded(folder: Path, *, write: bool = True) -> Iterator[None]:
    """Removes an earlier run's ``failure.txt``, and writes one if the block ends by an exception.

    Its first line is ``Type: message``, the rest the traceback. ``write=False`` for all processes but the first.
    """
    path = folder / FAILURE
    if write and path.is_file():
        path.unlink()
    try:
        yield
    except BaseException as error:
        if write:
            with suppress(OSError), replacing(path) as temporary:  # a full disk must not hide the error itself
                temporary.write_text(f"{headline(error)}\n\n{''.join(traceback.format_exception(error))}")
        raise


def headline(error: BaseException) -> str:
    """``Type: message`` in one line."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__  # Lightning turns a Ctrl-C into an exit
    if isinstance(error, KeyboardInterrupt):
        message = "stopped by the user"
    elif isinstance(error, SIGTERMException):
        message = "asked to end by SIGTERM"
    else:
        message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message}"
