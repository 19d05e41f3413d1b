"""What a run leaves for people: a table on the terminal, ``curves.png``, ``partition.png``, ``summary.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gcfed.data.label_counts import label_counts
from gcfed.metrics.convergence import summarize
from gcfed.report.runs import divergence, read_columns
from gcfed.utils.csv_logger import read_rows
from gcfed.utils.files import replacing
from gcfed.utils.pictures import show
from gcfed.utils.words import size

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from gcfed.data.datamodule import FederatedDataModule


def write_summary(
    folder: Path,
    data: FederatedDataModule,
    *,
    targets: Sequence[float],
    figures: bool,
    processes: int = 1,
    loggers: Sequence[Logger] = (),
) -> dict[str, Any]:
    """Reads the run's ``metrics.csv`` back, prints and writes its summary; returns what ``summary.json`` holds beside
    the time at which the run ended.

    ``processes`` are those among which the clients were dealt, ``loggers`` those that were told of the rounds.
    """
    rows = read_rows(folder / "metrics.csv")
    if not rows:
        return {}
    result = summary_of(rows, targets, processes)
    # JSON has neither NaN nor infinity, the loss of a model that diverged.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
    plain["ended"] = datetime.now().astimezone().isoformat(timespec="seconds")  # a copy of the file is younger
    with replacing(folder / "summary.json") as temporary:
        temporary.write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")
    if figures:
        from gcfed.report.figures import plot_curves

        plot_curves(rows, folder / "curves.png")
        show(loggers, "curves", folder / "curves.png", result["rounds"])
        if not (folder / "partition.png").is_file():
            draw_partition(folder, data)
    success = not divergence(plain, read_columns(folder / "metrics.csv"))
    for logger in loggers:
        if hasattr(logger, "log_summary"):
            logger.log_summary(last_figures(result, rows[-1]), result["rounds"], success=success)
    _print(result, folder)
    return result


def draw_partition(folder: Path, data: FederatedDataModule) -> Path | None:
    """Draws ``partition.png`` and returns its path; None where there are no classes to draw."""
    from gcfed.report.figures import plot_partition

    if (held := label_counts(data)) is None:
        return None
    title = f"{data.dataset.name}, {data.partitioner}"
    plot_partition(held.counts, folder / "partition.png", title, clients=held.clients, of=held.of)
    return folder / "partition.png"


def last_figures(result: Mapping[str, Any], last_row: Mapping[str, float]) -> dict[str, float]:
    """What a comparison of runs shows beside the ends of their curves: those figures of the summary that are no curve.

    ``test/rounds_to_<t>`` and ``test/rounds_to_<t>_ema`` are there for the targets that were reached.
    """
    figures = {name: value for name, value in result.items() if name.startswith("test/")}
    for key, end in (("rounds_to_target", ""), ("rounds_to_target_ema", "_ema")):
        figures |= {f"test/rounds_to_{t}{end}": r for t, r in result[key].items() if r is not None}
    return {name: float(v) for name, v in figures.items() if name not in last_row and math.isfinite(v)}


def summary_of(rows: Sequence[dict[str, float]], targets: Sequence[float], processes: int = 1) -> dict[str, Any]:
    """The figures of a run: accuracies in 0…1, bytes in all, seconds a round and a client (medians).

    A target that was not reached has None; ``_ema`` reads the moving average (FedACG's tables), the other the tests
    themselves. ``acc_diff/*`` are statistics of the change from one test to the next (GC-Fed's Table 2).
    ``client_seconds`` and ``*_to_target`` are FedGC's Table 2: what a client's share of a round takes the process that
    trains it, aggregation included, and such seconds and the bytes in both directions, of all clients together, in all
    rounds up to the first that reached the target.
    """
    acc = [row.get("test/acc", np.nan) for row in rows]
    curve = summarize([row["round"] for row in rows], acc, targets)
    return {
        "rounds": int(rows[-1]["round"]),
        "test/acc": curve.final,
        "test/acc_best": curve.best,
        "best_round": curve.best_round,
        "test/acc_smooth10": curve.smoothed,
        "test/acc_ema": curve.averaged,
        "acc_diff/mean": curve.diff_mean,
        "acc_diff/std": curve.diff_std,
        "acc_diff/min": curve.diff_min,
        **_errors(rows),
        "rounds_to_target": {f"{target:g}": curve.rounds_to[target] for target in targets},
        "rounds_to_target_ema": {f"{target:g}": curve.rounds_to_averaged[target] for target in targets},
        **_costs(rows, curve.rounds_to, processes),
        "comm/down_bytes": int(sum(row["comm/down_bytes"] for row in rows)),
        "comm/up_bytes": int(sum(row["comm/up_bytes"] for row in rows)),
        "time/round_s": float(np.median([row["time/round_s"] for row in rows])),
        "train/nonfinite_clients": int(sum(row["train/nonfinite_clients"] for row in rows)),
    }


def _costs(rows: Sequence[dict[str, float]], reached: dict[float, int | None], processes: int) -> dict[str, Any]:
    """Seconds of a client's round, and seconds and bytes up to each target: one round's number, if it was reached."""
    seconds = np.array([row["time/train_s"] * processes for row in rows])
    sent = np.array([row["comm/down_bytes"] + row["comm/up_bytes"] for row in rows])
    rounds = np.array([row["round"] for row in rows])

    def until(values: np.ndarray) -> dict[str, Any]:
        return {f"{t:g}": None if r is None else values[rounds <= r].sum().item() for t, r in reached.items()}

    return {
        "bytes_to_target": until(sent),
        "client_seconds": float(np.median(seconds / [row["train/clients"] for row in rows])),
        "client_seconds_to_target": until(seconds),
    }


def _errors(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Last and smallest value of what a test measures beside the accuracy."""
    found: dict[str, float] = {}
    for name in ("test/loss", "test/relative_error"):
        if values := [row[name] for row in rows if name in row]:
            found |= {name: values[-1], f"{name}_best": min(values, key=lambda value: (value != value, value))}
    return found


def _print(result: dict[str, Any], folder: Path) -> None:
    table = Table(title=f"{result['rounds']} rounds", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    has_accuracy = result["best_round"] is not None
    if has_accuracy:
        table.add_row("test accuracy, last round", f"{result['test/acc']:.2%}")
        table.add_row("best", f"{result['test/acc_best']:.2%} in round {result['best_round']}")
        table.add_row("mean of the last 10 tests", f"{result['test/acc_smooth10']:.2%}")
    for name in ("test/loss", "test/relative_error"):
        if name in result and not has_accuracy:
            label = name.replace("/", " ").replace("_", " ")
            table.add_row(label, f"{result[name]:.4g}, at best {result[f'{name}_best']:.4g}")
    if result["acc_diff/std"] == result["acc_diff/std"]:  # two tests at least
        mean, std, least = (100 * result[f"acc_diff/{name}"] for name in ("mean", "std", "min"))
        table.add_row("change from test to test", f"{mean:+.3f} ± {std:.2f}, at worst {least:+.1f} points")
    for key, label in (("rounds_to_target", "rounds to target"), ("rounds_to_target_ema", "… by the moving average")):
        reached = {t: r or f"{result['rounds']}+" for t, r in result[key].items()}
        if has_accuracy:
            table.add_row(label, ", ".join(f"{float(t):.0%}: {r}" for t, r in reached.items()))
    if has_accuracy and any(result["rounds_to_target"].values()):
        for key, label, shown in (
            ("bytes_to_target", "bytes to target", size),
            ("client_seconds_to_target", "clients' seconds to target", "{:.3g}".format),
        ):
            costs = ((t, cost) for t, cost in result[key].items() if cost is not None)
            table.add_row(label, ", ".join(f"{float(t):.0%}: {shown(cost)}" for t, cost in costs))
    table.add_row("bytes down, up", f"{size(result['comm/down_bytes'])}, {size(result['comm/up_bytes'])}")
    table.add_row("seconds a round (median)", f"{result['time/round_s']:.3f}")
    table.add_row("seconds a client's round", f"{result['client_seconds']:.3g}")
    if result["train/nonfinite_clients"]:
        table.add_row("client updates left out", f"{result['train/nonfinite_clients']} (not finite)")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{', '.join(sorted(p.name for p in folder.iterdir() if p.name[0] != '.'))} are in\n  {folder}")
