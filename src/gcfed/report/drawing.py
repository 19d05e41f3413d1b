"""How the report's figures are drawn: each takes its axes and returns a caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from gcfed.plots.style import PALETTE
from gcfed.report.groups import Group, sample, symbol
from gcfed.report.searches import Search
from gcfed.report.tables import describe, states
from gcfed.runs.folder import FINISHED
from gcfed.runs.measures import smooth

POINTS = 40  # that are drawn of a curve
UPDATES = "updates.csv"
AGREEMENT = "gc/rho/"
LABELS = {"test/acc": "test accuracy (%)", "test/loss": "test loss", "test/relative_error": "relative error"}
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


def curves(groups: Sequence[Group], column: str, colors: dict[str, Any], axes: Axes, *, by_bytes: bool = False) -> str:
    """A column over the rounds, or over the bytes sent: mean and deviation over each method's seeds; what has not
    finished is dotted."""
    parts: list[pd.DataFrame] = []
    for group in groups:
        for run in group.runs:
            curve = run.curve(column).replace(np.inf, np.nan).dropna()
            curve = 100 * smooth(curve) if column == "test/acc" else curve
            curve = curve.iloc[np.unique(np.linspace(0, len(curve) - 1, min(len(curve), POINTS)).astype(int))]
            about = {"method": group.method, "run": len(parts), "lost": run.state != FINISHED}
            about["sent"] = _bytes(run).reindex(curve.index).to_numpy()
            parts.append(pd.DataFrame({"round": curve.index, "y": curve.to_numpy(), **about}))
    table = pd.concat(parts, ignore_index=True)
    if by_bytes:  # seeds may send different numbers of bytes: a point is a round, at their mean
        alone = table["run"].where(table["lost"], "")
        table["round"] = table.groupby(["method", "round", alone])["sent"].transform("mean")
    whole, lost = table[~table["lost"]], table[table["lost"]]
    dashes = {m: ("", (4, 1.5), (8, 2), (6, 1.5, 1, 1.5))[i // 7 % 4] for i, m in enumerate(colors)}
    methods = list(table["method"].unique())
    look = {"x": "round", "y": "y", "hue": "method", "hue_order": methods, "palette": colors, "ax": axes}
    if len(whole):
        points = whole.groupby(["method", "round"], sort=False)["y"].agg(["mean", "std"]).reset_index()
        sns.lineplot(points.rename(columns={"mean": "y"}), estimator=None, style="method", dashes=dashes, **look)
        for method, part in points.dropna().sort_values("round").groupby("method", sort=False):
            ends = part["mean"] - part["std"], part["mean"] + part["std"]
            axes.fill_between(part["round"], *ends, color=colors[method], alpha=0.2, linewidth=0)
    if len(lost):
        height = axes.dataLim.intervaly.copy()
        sns.lineplot(lost, units="run", estimator=None, linestyle=":", linewidth=1.3, legend=not len(whole), **look)
        if len(whole):  # what diverged grows before it ends: it does not set the scale
            axes.dataLim.intervaly = height
            axes.autoscale_view()
    y = (whole if len(whole) else lost)["y"]
    if column == "test/relative_error" or (column != "test/acc" and y.min() > 0 and y.max() > 1000 * y.min()):
        axes.set_yscale("log")
    axes.set(xlabel="GB up and down" if by_bytes else "communication round", ylabel=LABELS.get(column, column))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not by_bytes))
    _legend(axes)
    caption = FAMILIES.get(column.partition("/")[0], column) + ". Lines: mean over seeds; bands: standard deviation."
    caption += " Each point is the mean of the last 10 tests." * (column == "test/acc")
    caption += " All clients' traffic together (FedGC, Figure 6)." * by_bytes
    return caption + " Dotted: runs that diverged, failed or are not finished." * (len(lost) > 0)


def against(points: pd.DataFrame, key: str, measure: str, colors: dict[str, Any], axes: Axes) -> str:
    """The result against a number that varies alone, a line a method; ``points`` has x, y, method."""
    title, unit, _ = describe(measure)
    points = points.reset_index(drop=True)  # seaborn wants a name for each
    methods = list(points["method"].unique())
    free = [color for color in PALETTE if color not in [colors.get(m) for m in methods]] or PALETTE
    palette = {m: colors.get(m) or free[i % len(free)] for i, m in enumerate(methods)}
    look = {"hue": "method", "palette": palette, "errorbar": "sd", "err_style": "bars", "marker": "o"}
    sns.lineplot(points, x="x", y="y", ax=axes, **look)
    if points["x"].min() > 0 and points["x"].max() >= 20 * points["x"].min():
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=symbol(key), ylabel=unit.heading(title))
    _legend(axes)
    return f"The result against {symbol(key)}, all else equal. Points: mean over seeds; bars: one standard deviation."


def bars(groups: Sequence[Group], measure: str, colors: dict[str, Any], axes: Axes) -> str:
    """Cost until the target, a bar a method; none where a seed did not reach it."""
    title, unit, _ = describe(measure)
    samples = {group.method: sample(group, measure, unit.factor) for group in groups}
    of = list(samples.values())
    values = {m: [np.nan] if s.bound or not s.values else list(s.values.values()) for m, s in samples.items()}
    table = pd.Series(values).explode().astype(float).rename_axis("method").reset_index(name="x")
    sns.barplot(table, x="x", y="method", hue="method", palette=colors, errorbar="sd", legend=False, ax=axes)
    for i, numbers in enumerate(values.values()):
        why = "not reached by every seed" if of[i].bound else states(groups[i].runs) or "not measured"
        axes.text(0, i, f" {why}" * bool(np.isnan(numbers[0])), va="center")
    axes.set(xlabel=unit.heading(title), ylabel="")
    axes.set_yticks(range(len(values)), [fill(method, 32) for method in values])
    axes.grid(visible=False, axis="y")
    return "The first test at the target. Bars: mean over seeds, with one standard deviation."


def layer_map(groups: Sequence[Group], layers: Sequence[str], axes: Axes) -> str:
    """Linear CKA of local and broadcast model, methods by layers, mean over all rounds and seeds."""
    rows = {g.method: {layer[4:]: sample(g, f"mean:{layer}").mean for layer in layers} for g in groups}
    table = pd.DataFrame(rows, dtype=float).T.dropna(how="all")
    sns.heatmap(table, vmax=1.0, annot=len(layers) <= 8, fmt=".2f", cmap="cividis", ax=axes)
    return "Linear CKA of the clients' models and the model they started from, by layer (GC-Fed, Figure 7)."


def agreement(group: Group, layers: Sequence[str], axes: Axes) -> str:
    """Each layer's agreement over the rounds, mean over the seeds and over as many rounds as a cell has."""
    table = pd.concat([run.metrics.reindex(columns=layers) for run in group.runs]).groupby(level=0).mean()
    table = table.dropna(how="all").rename(columns=lambda name: name.removeprefix(AGREEMENT))
    cells = [part for part in np.array_split(np.arange(len(table)), POINTS) if len(part)]
    means = pd.DataFrame({table.index[part[-1]]: table.iloc[part].mean() for part in cells})
    sns.heatmap(means, vmin=0, vmax=1, cmap="cividis", ax=axes)
    axes.set(xlabel="communication round", ylabel="")
    return "Whether clients agree in what P takes out of an update (ρ): 1 they do, 1/m it is noise. Mean over seeds."


def longest_updates(group: Group, axes: Axes) -> str:
    """The clients with the longest updates of a run, layer by layer; in a cell the share that P takes out."""
    run = group.runs[0]
    table = pd.read_csv(run.folder / UPDATES).replace(np.inf, np.nan)
    table["who"] = "round " + table["round"].astype(str) + ", client " + table["client"].astype(str)
    norms = table.pivot(index="who", columns="tensor", values="norm").reindex(columns=table["tensor"].unique())
    longest = norms.max(axis=1).nlargest(12).index
    norms, shares = norms.loc[longest], table.assign(share=(table["removed"] / table["norm"]) ** 2)
    shares = shares.pivot(index="who", columns="tensor", values="share").loc[longest, norms.columns]
    sns.heatmap(np.log10(norms), annot=shares, fmt=".0%", cmap="cividis", ax=axes)
    axes.set(xlabel="", ylabel="")
    return (
        f"Seed {run.seed}. Colour: log10 of the length of a client's update; number: the share of its square that "
        "gradient centralization takes out."
    )


def best_so_far(groups: Sequence[Group], searches: Mapping[Path, Search], colors: dict[str, Any], axes: Axes) -> str:
    """The best value after each trial, a line a search; a group is the first trial of one."""
    for group in groups:
        search = searches[group.runs[0].folder.parent]
        _, unit, _ = describe(search.metric)
        values = unit.factor * search.trials["value"]
        best = (values.cummax() if search.higher else values.cummin()).ffill()
        look = {"where": "post", "marker": ".", "label": group.method, "color": colors[group.method]}
        axes.step(search.trials["number"] + 1, best, **look)
        axes.set(xlabel="trials", ylabel=unit.heading(f"best {search.metric}"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    _legend(axes)
    return "The best value after as many trials, as the search saw it."


def _bytes(run: Any) -> pd.Series:
    """GB that all clients have sent and received, by round."""
    return run.metrics.filter(regex="^comm/.*_bytes$").sum(axis=1).cumsum() / 1e9


def _legend(axes: Axes) -> None:
    """Below the figure, so that long names take nothing from it."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = min(len(labels), max(1, 54 // max(map(len, labels))), 3)
        labels = [fill(label, 54) for label in labels]
        axes.legend(handles, labels, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.2))
