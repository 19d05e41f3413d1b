"""Writes the tables that have stored data, and draws the pictures of their pages:
``python reproductions/results/figures.py``

The curves are drawn from stored data, the other pictures from the tables made from them.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gcfed.folders.measures import smooth  # noqa: E402
from gcfed.plots.style import BLUE, GREEN, GREY, PURPLE, VERMILION, looks, save, styled  # noqa: E402
from reproductions.results import (  # noqa: E402
    borderlines,
    group_norm,
    late_updates,
    nearly_uniform,
    printed,
    repeated,
)
from reproductions.results.cells import ACCURACY, Comparison  # noqa: E402
from reproductions.stored import StoredRun, chosen, stored_runs  # noqa: E402

HERE = Path(__file__).parent
NUMBER = r"\d+(?:\.\d+)?"
DARK = matplotlib.rc_context(
    {
        "text.color": "#E6E6E6",
        "axes.labelcolor": "#E6E6E6",
        "xtick.labelcolor": "#E6E6E6",
        "ytick.labelcolor": "#E6E6E6",
        "grid.color": "#3A3A3A",
        "axes.facecolor": "none",
        "figure.facecolor": "none",
    }
)


def drawn(draw: Callable[[Figure], None], width: float, height: float) -> Figure:
    draw(figure := Figure(figsize=(width, height)))
    return figure


def table(page: str, number: int) -> list[list[str]]:
    """The cells of a table of a page, row by row, without the head."""
    tables = re.findall(r"(?:^\|.*\n)+", (HERE / page).read_text(), re.MULTILINE)
    rows = tables[number].strip().split("\n")[2:]
    return [
        [re.sub(r"[*`]", "", cell).strip() for cell in row.strip("|").split("|")] for row in rows
    ]


def numbers(cell: str) -> list[float]:
    """All numbers of a cell, except a standard deviation in brackets."""
    return [float(x) for x in re.findall(NUMBER, re.sub(r"\(.*?\)", "", cell))]


def dots(
    axes: Axes, rows: list[tuple[str, list[float]]], color: str, label: str = "", shift: float = 0.0
) -> None:
    """A line per row: a dot per seed, and a bar at the mean of several seeds."""
    for i, (_, points) in enumerate(rows):
        axes.plot(
            points,
            [i + shift] * len(points),
            "o",
            color=color,
            ms=5,
            alpha=0.8,
            label=label if i == 0 else None,
        )
        if len(points) > 1:
            axes.plot(sum(points) / len(points), i + shift, "|", color=color, ms=16, mew=2)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)


def over_rounds(axes: Axes, runs: Sequence[StoredRun], method: str) -> None:
    """Means of the ten tests in 50 rounds: thin each seed, thick their mean, up to the last round
    that all have.
    """
    look = looks([method])[method]
    seeds = [smooth(100 * run.curve(ACCURACY), 50) for run in runs]
    for seed in seeds:
        axes.plot(seed, **look, lw=0.8, alpha=0.6)
    mean = pd.concat(seeds, axis=1).mean(axis=1, skipna=False)
    axes.plot(mean, **look, lw=2.5, label=method)
    axes.set(xlabel="communication round", ylabel="test accuracy (%)")


def table5(
    figure: Figure, methods: Sequence[str] = ("GC-Fed", "FedAvg"), clipped: bool = False
) -> None:
    axes = figure.subplots()
    stored = stored_runs("gcfed-table5")
    for method in methods:
        found = chosen(stored, printed.GC[method])
        runs = [run for run in found if (printed.CLIPPED in run.overrides) == clipped]
        over_rounds(axes, runs, method)
    if not clipped:
        paper_of_table5(axes)
    axes.legend(loc="lower right", ncols=1 if clipped else 2)


def paper_of_table5(axes: Axes) -> None:
    """The paper's means and standard deviations, behind the last round."""
    paper = [("GC-Fed", VERMILION, 2.14), ("FedAvg", GREY, 1.40)]
    for method, color, deviation in paper:
        axes.errorbar(
            815,
            printed.PAPER[method],
            deviation,
            color=color,
            marker="D",
            ms=5,
            capsize=3,
            label=f"{method} in the paper",
        )


def compared(
    figure: Figure,
    page: str,
    plan: Comparison,
    look: Mapping[str, Mapping],
    legend: Literal["lower right", "upper left"] = "lower right",
) -> None:
    """Means of the tests in the measured rounds, up to the last round that all runs have."""
    axes = figure.subplots()
    stored = stored_runs(page)
    end = plan.end(stored)
    for name, run in plan.runs(stored).items():
        curve = smooth(100 * run.curve(ACCURACY), plan.measured)
        axes.plot(curve.loc[:end], **{"label": name, **look[name]})
    axes.set(xlabel="communication round", ylabel="test accuracy (%)")
    axes.legend(loc=legend, ncols=2)


def table4(figure: Figure) -> None:
    compared(figure, "gcfed-table4", nearly_uniform.PLAN, looks(nearly_uniform.METHODS))


def borderlines_of(figure: Figure) -> None:
    colors = (GREY, GREEN, BLUE, VERMILION, PURPLE)
    look = {
        lam: {"color": color, "label": f"λ {lam}"}
        for lam, color in zip(borderlines.LAMBDAS, colors, strict=True)
    }
    compared(figure, "gcfed-lambda", borderlines.PLAN, look)


def resnet18(figure: Figure) -> None:
    compared(figure, "resnet18-groupnorm", group_norm.PLAN, looks(group_norm.METHODS), "upper left")


def vgg11(figure: Figure) -> None:
    """Every test of both methods on 50 classes of TinyImageNet."""
    axes = figure.subplots()
    stored = stored_runs("tinyimagenet-vgg11")
    for method in ("GC-Fed", "FedAvg"):
        (run,) = chosen(stored, printed.GC[method])
        axes.plot(100 * run.curve(ACCURACY), **looks([method])[method], label=method)
    axes.axhline(2, color=GREY, lw=1, ls=":", label="chance")
    axes.set(xlabel="communication round", ylabel="test accuracy (%)", ylim=(0, None))
    axes.legend(loc="upper left")


def gc_warmup(figure: Figure) -> None:
    tables = [table("gc-warmup.md", number) for number in (0, 1)]
    titles = ("digits", "Fashion-MNIST", "CIFAR-10", "MNIST", "MNIST-M")
    columns = [(tables[0], 1), (tables[0], 2), (tables[0], 3), (tables[1], 1), (tables[1], 2)]
    names = {
        row[0].split(",")[0]: re.sub("^a rule .*", "a rule", row[0].split(",")[0])
        for row in tables[0]
    }
    for axes, title, (rows, column) in zip(
        figure.subplots(1, 5, sharey=True), titles, columns, strict=True
    ):
        cells = {row[0].split(",")[0]: row[column].partition(":")[2] for row in rows}
        dots(axes, [(name, numbers(cells.get(key, ""))) for key, name in names.items()], VERMILION)
        axes.set(title=title, xlabel="test accuracy (%)")


def robust(figure: Figure) -> None:
    rows = table("robust.md", 0)
    attacks = ("no attack", "sign flip ×4", "noise ×10", "label flip", "ALIE, z 1.5", "IPM, ε 0.5")
    for i, (axes, attack) in enumerate(
        zip(figure.subplots(1, 6, sharey=True), attacks, strict=True), 1
    ):
        cells = [(row[0], numbers(row[i])) for row in rows]
        dots(axes, [(name, both[1:]) for name, both in cells], VERMILION, "GC-Fed", -0.12)
        dots(axes, [(name, both[:1]) for name, both in cells], GREY, "FedAvg", 0.12)
        axes.set(title=attack, xlim=(85, 97.5))
        if i == 2:
            axes.text(85.3, 0.15, f"◂ {rows[0][i]}", fontsize=8)  # the mean lies outside
    axes.legend(loc="lower left", fontsize=7)
    figure.supxlabel("test accuracy (%)", fontsize=10)


ERRORS = (5, 10, 20, 50, 100, 200, 500)  # ticks of an axis


def ssf(figure: Figure) -> None:
    """The relative error at ν 0.5, by r/d."""
    axes = figure.subplots()
    (whole,) = [cells for nu, *cells in table("ssf.md", 0) if nu == "0.5"]
    for cell, color, label in zip(whole[-2:], (GREEN, GREY), ("SCAFFOLD", "FedAvg"), strict=True):
        axes.axhline(numbers(cell)[0], color=color, ls="--", label=label)
    ratios = [float(ratio) for ratio in repeated.RATIOS]
    colors = {"SSF": BLUE, "FedSub, refresh 1": VERMILION, "FedSub, refresh 5": PURPLE}
    for nu, method, *cells in table("ssf.md", 1):
        if nu == "0.5":
            means = [numbers(cell)[0] for cell in cells]
            axes.plot(ratios, means, "o-", color=colors[method], label=method)
    axes.set(xscale="log", yscale="log", xlabel="r/d", ylabel="relative error (10⁻³)")
    axes.set_xticks(ratios, repeated.RATIOS)
    axes.set_yticks(ERRORS, map(str, ERRORS))
    axes.minorticks_off()
    axes.legend()


def coherence(figure: Figure) -> None:
    for axes, column, title in zip(
        figure.subplots(1, 2, sharey=True), (2, 3), ("1–20", "81–100"), strict=True
    ):
        for method, alpha, *rho in table("coherence.md", 0):
            style = {
                "color": GREY if method == "FedAvg" else VERMILION,
                "ls": "-" if alpha == "0.1" else "--",
            }
            label, layers = f"{method}, α {alpha}", ["fc1", "fc2", "fc3"]
            axes.plot(layers, numbers(rho[column - 2]), marker="o", label=label, **style)
        axes.axhline(0.2, color=GREY, lw=1, ls=":")
        axes.set(title=f"rounds {title}", ylabel="ρ" * (column == 2))
    axes.legend(handlelength=4)


SECONDS = (1, 2, 5, 10, 20, 50, 100, 200)  # ticks of an axis
LATE_COLORS = {
    "FedAvg": GREY,
    "SCAFFOLD": GREEN,
    "FedBuff": BLUE,
    "FedAsync": VERMILION,
    "CA²FL": PURPLE,
}


def late_curves(figure: Figure) -> None:
    """Mean accuracies over the seeds, over uploads and over seconds."""
    runs = stored_runs("late-updates")
    panels = figure.subplots(2, 2, sharey=True)
    for row, spread in zip(panels, late_updates.SPREADS, strict=True):
        for name, method in late_updates.METHODS.items():
            color = LATE_COLORS[name]
            for gc, label, dash in (("none", name, ":"), ("gcfed", f"{name} + GC-Fed", "-")):
                own = [method.run(runs, gc, spread, seed) for seed in late_updates.SEEDS]
                curves = [100 * run.curve(ACCURACY) for run in own]
                mean = pd.concat(curves, axis=1).mean(axis=1)
                seconds = late_updates.mean_seconds(method, spread, mean.index)
                uploads = mean.index * method.per_round
                row[0].plot(uploads, mean, color=color, linestyle=dash, label=label)
                row[1].plot(seconds, mean, color=color, linestyle=dash)
        row[0].set(ylabel=f"σ {spread}: test accuracy (%)")
        row[1].set_xscale("log")
        row[1].set_xticks(SECONDS, map(str, SECONDS))
        row[1].minorticks_off()
        row[1].set_xlim(SECONDS[0], SECONDS[-1])
    panels[1][0].set(xlabel="uploads")
    panels[1][1].set(xlabel="simulated seconds, mean over the seeds")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def late_shares(figure: Figure) -> None:
    """The share of the uploads of each quarter of the clients by speed."""
    names = ("FedAvg", "FedBuff", "FedAsync")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, spread in zip(panels, late_updates.SPREADS, strict=True):
        for place, name in enumerate(names):
            of_uploads, _ = late_updates.by_quarter(late_updates.METHODS[name], spread)
            middle = [quarter + 0.27 * (place - 1) for quarter in range(len(of_uploads))]
            label = "synchronous" if name == "FedAvg" else name
            axes.bar(middle, of_uploads, width=0.25, color=LATE_COLORS[name], label=label)
        axes.axhline(25, color=GREY, lw=1, ls=":")
        labels = [quarter.replace(" ", "\n") for quarter in late_updates.QUARTERS]
        axes.set_xticks(range(len(labels)), labels)
        axes.set(title=f"σ {spread}")
    panels[0].set(ylabel="share of uploads (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")


if __name__ == "__main__":
    matplotlib.use("agg")
    printed.update()
    clipped = partial(table5, methods=("GC-Fed", "Global GC", "FedAvg"), clipped=True)
    drawings: dict[str, tuple[Callable, float, float]] = {
        "gcfed_table5": (table5, 8, 3.4),
        "gcfed_table5_clipped": (clipped, 8, 3.4),
        "gcfed_table4": (table4, 8, 3.4),
        "gcfed_lambda": (borderlines_of, 8, 3.4),
        "resnet18_groupnorm": (resnet18, 8, 3.4),
        "robust": (robust, 12, 2.8),
        "ssf": (ssf, 7, 3.4),
        "tinyimagenet_vgg11": (vgg11, 7, 3),
        "coherence": (coherence, 8, 2.8),
        "gc_warmup": (gc_warmup, 12, 3),
        "late_curves": (late_curves, 11, 7),
        "late_shares": (late_shares, 9, 3),
    }
    for name, drawing in drawings.items():
        # README.md shows that one, too
        folder = HERE.parents[1] / "docs" if name == "gcfed_table5" else HERE
        save(styled(drawn)(*drawing), folder / "images" / f"{name}.png")
        if name == "gcfed_table5":
            save(styled(DARK(drawn))(*drawing), folder / "images" / f"{name}_dark.png")
