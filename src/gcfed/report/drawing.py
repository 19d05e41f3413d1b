"""How the report's figures are drawn: each takes its axes and returns a caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gcfed.plots.style import FACTORS, LABELS, PALETTE, logarithmic, ticks
from gcfed.report.groups import Group, symbol
from gcfed.report.tables import Search
from gcfed.report.verdict import interval
from gcfed.runs.folder import FINISHED, Run
from gcfed.runs.measures import Column, Sample, describe, sample, smooth, states

POINTS = 40  # that are drawn of a curve
UPDATES = "updates.csv"
AGREEMENT = "gc/rho/"
#: What a family of columns is, and the figure of a paper that shows it.
FAMILIES = {
    "test": "Global model on the test split (GC-Fed, Figures 4 and 6)",
    "gap": "Mean update of the cohort against the mean update of all clients (GC-Fed, Figure 1b)",
    "drift": "Norms of the clients' updates and of their mean, and how far they lie apart (FedACG, Figure 2b)",
    "angle": "Angles of the clients' updates to the server's last step and to the round's update (FedGC, eq. 1 and 8)",
    "forgetting": "Loss before and after local training on the data of the cohort (FedGC, Figure 7)",
    "clients": "Clients on their own data, before and after local training",
    "personal": "Global and local models on the clients' own test splits",
    "leakage": "What deep leakage from gradients recovers of a client's images (FedGC, Appendix A.5)",
    "fedgc": "How often the constraints of FedGC bind",
}
_DASHES = ("-", (0, (4, 1.5)), (0, (8, 2)), (0, (6, 1.5, 1, 1.5)))  # of seven methods each


def seeds(methods: Mapping[str, tuple[Group, Sample]], column: Column, colors: dict[str, Any], axes: Axes) -> str:
    """A line a method: the result of every seed, their mean and its 95 % interval; or why there is none."""
    numbers = {y: [*s.values.values()] for y, (_, s) in enumerate(methods.values()) if s.values and not s.bound}
    several = {y: x for y, x in numbers.items() if len(x) > 1}
    shades = [colors[method] for method in methods]
    ends = np.array([interval(x) for x in several.values()]).reshape(-1, 2)
    axes.hlines([*several], ends[:, 0], ends[:, 1], colors=[shades[y] for y in several], alpha=0.25, linewidth=9)
    axes.plot([np.mean(x) for x in several.values()], [*several], "k|", markersize=11, markeredgewidth=2)
    dots = pd.DataFrame([(x, y) for y, values in numbers.items() for x in values], columns=["x", "y"])
    equal = dots.groupby(["x", "y"])["y"]
    place, of = equal.cumcount(), equal.transform("size")  # equal ones would lie on each other
    rows = dots["y"] + (place - (of - 1) / 2) * np.minimum(0.2, 0.8 / of)
    sizes = [20 if y in several else 50 for y in dots["y"]]
    axes.scatter(dots["x"], rows, sizes, [shades[y] for y in dots["y"]], zorder=3, clip_on=False)
    for y, (group, s) in enumerate(methods.values()):
        if y not in numbers:
            why = "not reached by every seed" if s.bound else states(group.runs) or "not measured"
            axes.text(0.02, y, why, transform=axes.get_yaxis_transform(), va="center", fontsize="small")
    axes.set_yticks(range(len(methods)), [fill(method, 22) for method in methods])
    axes.set(xlabel=column.heading, ylim=(len(methods) - 0.5, -0.5))
    axes.grid(visible=False, axis="y")
    low, high = axes.get_xlim()
    if min(chain(*numbers.values()), default=-1) >= 0:  # intervals of few seeds go where no result can be
        axes.set_xlim(max(low, 0), min(high, 100) if column.unit == "%" else high)
    ticks(axes, 5, whole=column.unit == "rounds")
    return "Dots: seeds. Lines: their mean. Bars: its 95 % interval (Student's t)."


def curves(
    groups: Sequence[Group],
    column: str,
    colors: dict[str, Any],
    axes: Axes,
    *,
    smoothed: bool = False,
    by_bytes: bool = False,
) -> str:
    """A column over the rounds, or over the bytes sent: mean and deviation over each method's seeds, of each test or
    ``smoothed``; what has not finished is dotted."""
    parts = [(group.method, [run for run in group.runs if run.state == FINISHED], False) for group in groups]
    parts += [(group.method, [run], True) for group in groups for run in group.runs if run.state != FINISHED]
    looks = {m: {"color": color, "linestyle": _DASHES[i // 7 % 4]} for i, (m, color) in enumerate(colors.items())}
    low, high, scale = np.inf, -np.inf, None
    for method, runs, is_lost in (part for part in parts if part[1]):
        y = _thinned({run.seed: _finite(run, column, smoothed) for run in runs})
        if y.empty:
            continue
        x, mean, std = y.index, y.mean(axis=1), y.std(axis=1)
        if by_bytes:
            x = pd.DataFrame({run.seed: sent(run).cumsum() for run in runs}).reindex(y.index).mean(axis=1)
        if is_lost and scale is None and np.isfinite(high):
            scale = axes.dataLim.intervaly.copy()
        look = looks[method] | ({"linestyle": ":", "linewidth": 1.3} if is_lost else {})
        known = axes.get_legend_handles_labels()[1]
        axes.plot(x, mean, marker="o" if len(y) == 1 else None, label=None if method in known else method, **look)
        axes.fill_between(x, mean - std, mean + std, color=colors[method], alpha=0.2, linewidth=0)
        if scale is None:
            low, high = np.nanmin([low, *mean]), np.nanmax([high, *mean])
    if scale is not None:  # what diverged grows before it ends: it does not set the scale
        axes.dataLim.intervaly = scale
        axes.autoscale_view()
    if column == "test/relative_error" or (column != "test/acc" and low > 0 and high > 1000 * low):
        logarithmic(axes, "y")
    axes.set(xlabel="GB up and down" if by_bytes else "communication round", ylabel=LABELS.get(column, column))
    ticks(axes, whole=not by_bytes)
    caption = FAMILIES.get(column.partition("/")[0], column)
    caption += ". Lines: mean over the seeds that finished; bands: standard deviation."
    caption += " Each point is the mean of the tests in 10 rounds." * smoothed
    caption += " All clients' traffic together (FedGC, Figure 6)." * by_bytes
    return caption + " Dotted: runs that diverged, failed or are not finished." * any(lost for *_, lost in parts)


def _finite(run: Run, column: str, smoothed: bool) -> pd.Series:
    curve = run.curve(column).replace(np.inf, np.nan).dropna()
    return FACTORS.get(column, 1) * (smooth(curve) if smoothed else curve)


def _thinned(curves: Mapping[int, pd.Series]) -> pd.DataFrame:
    """So many points of the seeds' curves, at rounds that all have which were measured: a mean of now these seeds, now
    those would jump."""
    y = pd.DataFrame({seed: curve for seed, curve in curves.items() if len(curve)}).dropna()
    return y.iloc[np.unique(np.linspace(0, len(y) - 1, min(len(y), POINTS)).astype(int))]


def sent(run: Run) -> pd.Series:
    """GB that all clients send and receive, by round."""
    return run.metrics.filter(regex="^comm/.*_bytes$").sum(axis=1) / 1e9


def against(points: pd.DataFrame, key: str, measure: str, colors: dict[str, Any], axes: Axes) -> str:
    """The result against a number that varies alone, a line a method; ``points`` has x, y, method."""
    methods = points["method"].unique()
    free = [color for color in PALETTE if color not in map(colors.get, methods)] or PALETTE
    for i, (method, part) in enumerate(points.groupby("method", sort=False)):
        y = part.groupby("x")["y"].agg(["mean", "std"])
        color = colors.get(method) or free[i % len(free)]
        axes.errorbar(y.index, y["mean"], y["std"], marker="o", color=color, label=method)
    if points["x"].min() > 0 and points["x"].max() >= 20 * points["x"].min():
        logarithmic(axes, "x")
    axes.set(xlabel=symbol(key), ylabel=describe(measure).heading)
    return f"The result against {symbol(key)}, all else equal. Points: mean over seeds; bars: one standard deviation."


def layer_map(groups: Sequence[Group], layers: Sequence[str], axes: Axes) -> str:
    """Linear CKA of local and broadcast model, methods by layers, mean over all rounds and seeds."""
    rows = {fill(g.method, 22): {layer[4:]: sample(g.runs, f"mean:{layer}").mean for layer in layers} for g in groups}
    table = pd.DataFrame(rows, dtype=float).T.dropna(how="all")
    _heat(table, axes, vmax=1.0, annot=len(layers) <= 8, fmt=".2f")
    return "Linear CKA of the clients' models and the model they started from, by layer (GC-Fed, Figure 7)."


def agreement(group: Group, layers: Sequence[str], axes: Axes) -> str:
    """Each layer's agreement over the rounds, mean over the seeds and over as many rounds as a cell has."""
    table = pd.concat([run.metrics.reindex(columns=layers) for run in group.runs]).groupby(level=0).mean()
    table = table.dropna(how="all").rename(columns=lambda name: name.removeprefix(AGREEMENT))
    cells = [part for part in np.array_split(np.arange(len(table)), POINTS) if len(part)]
    means = pd.DataFrame({table.index[part[-1]]: table.iloc[part].mean() for part in cells})
    _heat(means, axes, vmin=0, vmax=1, cbar_kws={"label": "ρ"})
    axes.set(xlabel="communication round")
    return "Whether clients agree in what P takes out of an update (ρ): 1 they do, 1/m it is noise. Mean over seeds."


def longest_updates(group: Group, axes: Axes) -> str:
    """The clients with the longest updates of a run, layer by layer; in a cell the share that P takes out."""
    run = group.runs[0]
    table = pd.read_csv(run.folder / UPDATES).replace(np.inf, np.nan)
    table["who"] = "round " + table["round"].astype(str) + ", client " + table["client"].astype(str)
    table["share"] = (table["removed"] / table["norm"]) ** 2
    table = table.pivot(index="who", columns="tensor", values=["norm", "share"])
    longest = table["norm"].fillna(np.inf).max(axis=1).nlargest(12).index
    norms, shares = table["norm"].loc[longest], table["share"].loc[longest]
    _heat(np.log10(norms.where(norms > 0)), axes, annot=shares, fmt=".0%", cbar_kws={"label": "log₁₀ ‖Δ‖"})
    return (
        f"Seed {run.seed}. Colour: log10 of the length of a client's update; number: the share of its square that "
        "gradient centralization takes out. Empty: not finite, or of no length."
    )


def best_so_far(searches: Mapping[str, Search], colors: dict[str, Any], axes: Axes) -> str:
    """The best value after each trial, a line a search."""
    for name, search in searches.items():
        column = describe(search.metric)
        values = column.factor * search.trials["value"]
        best = (values.cummax() if search.higher else values.cummin()).ffill()
        axes.step(search.trials["number"] + 1, best, where="post", marker=".", label=name, color=colors[name])
        axes.set(xlabel="trials", ylabel=column.heading)
    ticks(axes)
    return "The best value after as many trials, as the search saw it."


def _heat(table: pd.DataFrame, axes: Axes, **look: Any) -> None:
    import seaborn  # half a second, for reports that have a map

    seaborn.heatmap(table, cmap="cividis", ax=axes, **look)
    axes.tick_params(axis="y", labelrotation=0)
    axes.set(xlabel="", ylabel="")
