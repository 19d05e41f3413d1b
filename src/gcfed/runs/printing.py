"""What a run prints, and its log has too: the config that it begins with, the figures that it ends with."""

from __future__ import annotations

import io
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console, RenderableType
from rich.table import Table

from gcfed.runs.measures import WINDOW
from gcfed.runs.metrics_csv import column
from gcfed.runs.summary import ERRORS
from gcfed.utils.words import size

if TYPE_CHECKING:
    import pandas as pd

USUAL = {"train", "test", "val", "comm", "time"}  # first parts of the columns that every run has


def tell(*parts: RenderableType) -> None:
    """To the terminal and, without colours, to the files of the log."""
    console, text = Console(soft_wrap=True), io.StringIO()
    console.print(*parts, sep="\n")
    plain = Console(file=text, soft_wrap=True, width=console.width, force_jupyter=False)  # which would display it, too
    plain.print(*parts, sep="\n")
    record = logging.makeLogRecord({"msg": text.getvalue().rstrip(), "levelno": logging.INFO})
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
    tell(table, f"{', '.join(files)} are in\n  {folder}")


def _figures(summary: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, str]:
    rows: dict[str, str] = {}
    tests = len(column(metrics, "test/acc"))
    if tests == 0:
        rows |= {n: f"{summary[n]:.4g}, at best {summary[f'{n}_best']:.4g}" for n in ERRORS if n in summary}
    else:
        rows["test accuracy, last round"] = f"{summary['test/acc']:.2%}"
        rows["best"] = f"{summary['test/acc_best']:.2%} in round {summary['best_round']}"
    if tests > 1:
        rows[f"mean of the last {min(tests, WINDOW)} tests"] = f"{summary['test/acc_smooth10']:.2%}"
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
    return rows


def _measured(metrics: pd.DataFrame, most: int = 8) -> dict[str, str]:
    """The last values of what ``metrics=…`` asked for, a row a metric."""
    values: dict[str, list[str]] = defaultdict(list)
    for name in metrics:
        kind, _, figure = name.partition("/")
        if kind not in USUAL and len(curve := column(metrics, name)):
            values[kind].append(f"{figure} {curve.iloc[-1]:.4g}")
    return {kind: ", ".join(found[:most]) + ", …" * (len(found) > most) for kind, found in values.items()}
