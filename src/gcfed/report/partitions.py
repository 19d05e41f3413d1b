"""How the data lie on the clients, partitions side by side: GC-Fed's Figure 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gcfed.data.label_counts import LabelCounts, evenly
from gcfed.data.partition import Partition
from gcfed.report.figures import bubble_size, draw_bubbles, draw_sizes, ticks
from gcfed.report.groups import Group, federation_of
from gcfed.report.panels import Drawn, grid, outer_labels, plural, title
from gcfed.report.runs import Run
from gcfed.report.series import thin
from gcfed.report.style import GREY, save, styled

MOST = 6
CLIENTS = 20  # a panel; 12 where four stand in a row
_DEAL = ("tags.data", "participation.num_clients", "partition.", "data.")  # what a partition depends on, and the seed


@styled
def plot_partitions(groups: Sequence[Group], path: Path) -> Drawn | None:
    """Samples of each class at each client, a panel a partition; sizes of clients only, where runs hold no more.

    Of each partition that differs by more than the seed, the one of the lowest seed.
    """
    found: dict[str, tuple[Mapping[str, Any], list[Run]]] = {}
    for group in groups:
        dealt = {k: v for k, v in group.setting.items() if k.startswith(_DEAL)}
        found.setdefault(repr(sorted(dealt.items())), (group.setting, []))[1].extend(group.runs)
    dealt_by_seed = [
        (setting, sorted(runs, key=lambda run: run.seed))
        for setting, runs in sorted(found.values(), key=lambda pair: _order(pair[0]))
    ]
    bubbles = [(setting, *held) for setting, runs in dealt_by_seed if (held := _counts(runs))]
    sizes = [(setting, *its) for setting, runs in dealt_by_seed if not bubbles and (its := _sizes(runs))]
    if not bubbles and not sizes:
        return None
    drawn = _plot_bubbles(bubbles[:MOST], path) if bubbles else _plot_sizes(sizes[:MOST], path)
    count = min(len(bubbles or sizes), MOST)
    left_out = f" {count} of {plural(len(found), 'partition')} drawn." if count < len(found) else ""
    return Drawn(drawn.figure, drawn.caption + left_out)


def _counts(runs: Iterable[Run]) -> tuple[LabelCounts, int] | None:
    """The first run's that has any, and its seed."""
    for run in runs:
        if (held := LabelCounts.load(run.folder)) is not None:
            return held, run.seed
    return None


def _sizes(runs: Iterable[Run]) -> tuple[NDArray[np.int64], int] | None:
    for run in runs:
        try:
            return Partition.load(run.folder / "partition.npz").sizes, run.seed
        except (OSError, ValueError):
            continue
    return None


def _names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the data are dealt, and data set and number of clients where they differ."""
    rows = []
    for setting in settings:
        data, _, _, partition, _ = federation_of(setting)
        rows.append((data, f"{setting.get('participation.num_clients', 'all')} clients", partition))
    told = [*(len(set(column)) > 1 for column in list(zip(*rows, strict=True))[:2]), True]
    return [", ".join(compress(row, told)) for row in rows]


def _order(setting: Mapping[str, Any]) -> tuple[Any, ...]:
    """By data set, then by α: a larger one is more even."""
    alpha = setting.get("partition.alpha")
    number = float(alpha) if isinstance(alpha, int | float) else np.inf
    return str(setting.get("tags.data")), str(setting.get("partition._target_")), number


def _plot_bubbles(found: list[tuple[Mapping[str, Any], LabelCounts, int]], path: Path) -> Drawn:
    columns = len(found) if len(found) <= 4 else 3
    rows = -(-len(found) // columns)
    shown = [evenly(len(held.clients), CLIENTS if columns < 4 else 12) for _, held, _ in found]
    parts = [held.counts[keep] for (_, held, _), keep in zip(found, shown, strict=True)]
    classes = max(part.shape[1] for part in parts)
    width, height = {1: 4.4, 2: 3.6, 4: 2.6}.get(columns, 3.1), float(np.clip(0.17 * classes, 1.3, 3.6))
    figure = Figure(figsize=(columns * width + 0.8, rows * (height + 1.3)))
    axes = figure.subplots(2 * rows, columns, squeeze=False, height_ratios=[0.55, height] * rows)
    largest = int(max(part.max() for part in parts)) or 1
    cells = [np.array([(width - 0.7) / len(part), height / part.shape[1]]) for part in parts]
    diameter = min(bubble_size(part, cell, largest=largest) for part, cell in zip(parts, cells, strict=True))
    highest = max(part.sum(1).max() for part in parts)
    for i, (name, part) in enumerate(zip(_names([setting for setting, _, _ in found]), parts, strict=True)):
        bars, bubbles = axes[2 * (i // columns) : 2 * (i // columns) + 2, i % columns]
        draw_sizes(bars, part)
        bars.set(xlim=(-0.7, len(part) - 0.3), ylim=(0, 1.05 * highest))
        bars.set_xticks([])
        title(bars, name)
        last_of_row = i % columns == columns - 1 or i == len(found) - 1
        draw_bubbles(bubbles, part, largest=largest, diameter=diameter, legend=last_of_row and i < columns)
        place = ticks(len(part), 10)
        ids = found[i][1].clients[shown[i]]
        bubbles.set_xticks(place, [str(k) for k in ids[place]])
        bubbles.set_yticks(ticks(part.shape[1], 10))
        bubbles.set_xlabel("client")
        if i % columns == 0:
            bars.set_ylabel("samples")
            bubbles.set_ylabel("class")
        else:
            bars.set_yticklabels([])
    for unused in range(len(found), rows * columns):
        for ax in axes[2 * (unused // columns) : 2 * (unused // columns) + 2, unused % columns]:
            ax.remove()
    save(figure, path)
    fewer = [
        f"{len(keep)} of {held.of:,}" for (_, held, _), keep in zip(found, shown, strict=True) if len(keep) < held.of
    ]
    subset = f" {', '.join(dict.fromkeys(fewer))} clients are drawn, evenly spaced." if fewer else ""
    return Drawn(
        figure,
        "How the training data lie on the clients: a bubble's area is the number of samples of a class at a client, on "
        f"one scale for all panels; bars count the samples of each. {_seeds([seed for _, _, seed in found])}{subset}",
    )


def _plot_sizes(found: list[tuple[Mapping[str, Any], NDArray[np.int64], int]], path: Path) -> Drawn:
    figure, axes = grid(len(found), size=(3.3, 2.3))
    for ax, name, (_, sizes, _) in zip(axes, _names([setting for setting, _, _ in found]), found, strict=True):
        ordered = np.sort(sizes)[::-1]
        keep = thin(len(ordered), 200)
        ax.fill_between(np.arange(len(keep)), ordered[keep], step="mid", color=GREY, linewidth=0)
        ax.set(xlabel=f"client, by size ({len(sizes):,} in all)", ylabel="training samples", ylim=(0, None))
        ax.set_xticks([])
        ax.margins(x=0)
        title(ax, name)
    outer_labels(axes)
    save(figure, path)
    return Drawn(
        figure, f"Training samples of each client, the largest first. {_seeds([seed for _, _, seed in found])}"
    )


def _seeds(seeds: list[int]) -> str:
    return f"The partition of seed {seeds[0]}." if len(set(seeds)) == 1 else "Each of the lowest seed that was run."
