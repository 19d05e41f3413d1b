"""The report's figures: curves over the rounds, values against a number, bars to a target, a map of the layers."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from gcfed.data.label_counts import LabelCounts
from gcfed.plots.partition import plot_partition
from gcfed.plots.style import PALETTE, save, styled
from gcfed.report.groups import Group, differing, sample, symbol, variants
from gcfed.report.tables import by_federation, describe, main_measure, states
from gcfed.runs.folder import FINISHED
from gcfed.runs.measures import smooth

matplotlib.use("agg")  # seaborn imports pyplot, which would look for a display

FEDERATIONS, METHODS, POINTS, MAPS = 6, 12, 40, 4  # that are drawn: federations, methods of each, points, maps
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


class Picture(NamedTuple):
    """``file`` is the PNG; ``federation`` is what its runs have in common."""

    file: Path
    title: str
    caption: str
    federation: str


class Plot(NamedTuple):
    """A figure to come: ``draw`` takes its axes and returns its caption; ``height`` is in inches."""

    name: str
    title: str
    federation: str
    draw: Callable[[Axes], str]
    height: float = 3.4


@styled
def draw(groups: Sequence[Group], folder: Path, formats: Sequence[str], failed: dict[str, str]) -> list[Picture]:
    """Writes every figure that the groups have something for. ``failed`` takes the errors by the figures' titles."""
    folder.mkdir(parents=True, exist_ok=True)
    suffixes = list(dict.fromkeys(["png", *formats]))
    pictures = []
    for plot in _plots(groups):
        files = [folder / f"{plot.name}.{suffix}" for suffix in suffixes]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # matplotlib's, of what cannot be read on the figure
                figure = Figure(figsize=(5.4, plot.height))
                caption = plot.draw(figure.subplots())
                for path in files:
                    save(figure, path)
        except Exception as error:  # whatever it is, it must not cost the other figures and the tables
            failed[f"{plot.title}, {plot.federation}"] = f"{type(error).__name__}: {error}"
            for path in files:
                path.unlink(missing_ok=True)
        else:
            pictures.append(Picture(files[0], plot.title, caption, plot.federation))
    try:
        pictures += _partitions(groups, folder, suffixes)
    except Exception as error:
        failed["Partition"] = f"{type(error).__name__}: {error}"
    return pictures


def _plots(groups: Sequence[Group]) -> Iterator[Plot]:
    colors = {m: PALETTE[i % 7] for i, m in enumerate(dict.fromkeys(group.method for group in groups))}
    for i, (place, members) in enumerate(list(by_federation(groups).items())[:FEDERATIONS], start=1):
        members = _best([group for group in members if any(len(run.metrics) for run in group.runs)])
        lines = sum(len(group.method) // 32 for group in members)  # more than one each, of long names
        columns = dict.fromkeys(name for group in members for run in group.runs for name in run.metrics)
        for column in columns:
            if column in LABELS or column.partition("/")[0] in FAMILIES.keys() - {"test"}:
                name, title = re.sub(r"\W+", "_", column), LABELS.get(column, column)
                yield Plot(f"{name}_{i}", title, place, partial(curves, members, column, colors), 3.4 + 0.12 * lines)
        if "test/acc" in columns and (measure := _target(members)):
            plot = partial(bars, members, measure, colors)
            yield Plot(f"target_{i}", describe(measure)[0], place, plot, 1.2 + 0.3 * len(members) + 0.12 * lines)
        if "test/acc" in columns and len({*map(_sent, members)}) > 1:
            plot = partial(curves, members, "test/acc", colors, by_bytes=True)
            yield Plot(f"bytes_{i}", "Test accuracy by bytes", place, plot, 3.4 + 0.12 * lines)
        layers = [name for name in columns if name.startswith(AGREEMENT)]
        agreed = [g for g in members if any({*layers} & {*run.metrics} for run in g.runs)]
        for j, group in enumerate(agreed[:MAPS], start=1):
            plot = partial(agreement, group, layers)
            yield Plot(f"rho_{i}_{j}", f"Do clients agree? {group.method}", place, plot, 1.6 + 0.25 * len(layers))
        for j, group in enumerate([g for g in members if (g.runs[0].folder / UPDATES).is_file()][:MAPS], start=1):
            plot = partial(longest_updates, group)
            yield Plot(f"updates_{i}_{j}", f"The longest updates, {group.method}", place, plot, 4.2)
        layers = [name for name in columns if name.startswith("cka/")]
        if any(sample(group, f"mean:{layer}").values for group in members for layer in layers):
            plot = partial(layer_map, members, layers)
            yield Plot(f"cka_{i}", "Similarity by layer", place, plot, 1.6 + 0.4 * len(members))
    yield from _sweeps(groups, colors)


def _best(groups: Sequence[Group]) -> list[Group]:
    """Those with the best result, as many as can be told apart, in their own order."""
    measure = main_measure(groups)
    results = pd.Series([sample(group, measure).mean for group in groups], dtype=float)
    ranks = results.rank(ascending=not describe(measure)[2], method="first", na_option="bottom")
    return [group for group, rank in zip(groups, ranks, strict=True) if rank <= METHODS]


# ------------------------------------------------------------------------------------------------------- the figures
def curves(groups: Sequence[Group], column: str, colors: dict[str, Any], axes: Axes, *, by_bytes: bool = False) -> str:
    """A column over the rounds, or over the bytes sent: mean and deviation over each method's seeds; what has not
    finished is dotted."""
    parts = []
    for group in groups:
        for run in group.runs:
            curve = run.curve(column).replace(np.inf, np.nan).dropna()
            curve = 100 * smooth(curve) if column == "test/acc" else curve
            curve = curve.iloc[np.unique(np.linspace(0, len(curve) - 1, min(len(curve), POINTS)).astype(int))]
            about = {"method": group.method, "run": str(run.folder), "lost": run.state != FINISHED}
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
        sns.lineplot(whole, errorbar="sd", style="method", dashes=dashes, **look)
    if len(lost):
        sns.lineplot(lost, units="run", estimator=None, linestyle=":", linewidth=1.3, legend=not len(whole), **look)
    y = (whole if len(whole) else lost)["y"]
    if column == "test/relative_error" or (column != "test/acc" and y.min() > 0 and y.max() > 1000 * y.min()):
        axes.set_yscale("log")
    elif len(lost) and len(whole):  # what diverged grows before it ends
        axes.set_ylim(y.min() - 0.05 * np.ptp(y) - 1e-9, y.max() + 0.05 * np.ptp(y) + 1e-9)
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


def _sent(group: Group) -> str:
    """What a round of the method sends, roughly; the same text for methods that send the same."""
    run = next((run for run in group.runs if len(run.metrics)), group.runs[0])
    return f"{run.metrics.filter(regex='^comm/.*_bytes$').sum(axis=1).mean():.2g}"


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


# --------------------------------------------------------------------------------------------------- what they are of
def _target(groups: Sequence[Group]) -> str:
    """The highest target that half of several methods reached; in bytes where they differ in what they send."""
    sent = {*map(_sent, groups)}
    for target in sorted({float(t) for g in groups for t in g.runs[0].get("targets") or ()}, reverse=True):
        samples = [sample(group, f"rounds:test/acc>={target:g}") for group in groups]
        if len(groups) > 1 and 2 * sum(bool(s.values) and not s.bound for s in samples) >= len(groups):
            return f"bytes_to_target/{target:g}" if len(sent) > 1 else f"rounds:test/acc>={target:g}"
    return ""


def _sweeps(groups: Sequence[Group], colors: dict[str, Any]) -> Iterator[Plot]:
    """A figure for each number in which groups differ that are equal in all else."""
    ended = [group for group in groups if group.has_ended]
    frame = variants([group.values for group in ended]) if ended else pd.DataFrame()
    every = differing([group.values for group in ended]) if ended else frame
    for key in frame.columns.difference(["rounds", "eval_every"]):
        x = pd.to_numeric(frame[key], errors="coerce").dropna()
        same = [name for name in every if every[name].equals(every[key])]  # the same number under another name
        rest = every.assign(**dict.fromkeys(same, "")).apply(tuple, axis=1)
        parts: dict[tuple[str, str], list[pd.DataFrame]] = defaultdict(list)
        for indices in x.groupby(rest).groups.values():
            members = [ended[i] for i in indices]
            places, methods = ([getattr(g, name).split(", ") for g in members] for name in ("federation", "method"))
            place = ", ".join(part for part in places[0] if all(part in other for other in places))
            known = dict.fromkeys(part for method in methods for part in method)  # a name lacks what most have
            method = ", ".join(part for part in known if not part.startswith(f"{symbol(key)} "))
            # Against the clients a round: also how far their update is from that of all (GC-Fed, Figure 1b).
            gaps = [name for name in members[0].runs[0].metrics if name.startswith("gap/") and "per_round" in key]
            for measure in (main_measure(members), *(f"mean:{gap}" for gap in gaps)) if len(members) > 1 else ():
                for i in indices:
                    y = list(sample(ended[i], measure, describe(measure)[1].factor).values.values())
                    parts[place, measure].append(pd.DataFrame({"x": x[i], "y": y, "method": method}))
        for i, ((place, measure), points) in enumerate(parts.items(), start=1):
            plot = partial(against, pd.concat(points), key, measure, colors)
            yield Plot(f"{key}_{i}", f"{describe(measure)[0]} against {symbol(key)}", place, plot)


def _partitions(groups: Sequence[Group], folder: Path, suffixes: Sequence[str]) -> Iterator[Picture]:
    """How the data lie on the clients, each partition once (GC-Fed, Figure 5)."""
    held: dict[bytes, tuple[Group, LabelCounts]] = {}
    for group in groups:
        if counts := LabelCounts.load(group.runs[0].folder):
            held.setdefault(counts.counts.tobytes(), (group, counts))
    for i, (group, counts) in enumerate(list(held.values())[:FEDERATIONS], start=1):
        for suffix in reversed(suffixes):
            path = folder / f"partition_{i}.{suffix}"
            plot_partition(counts.counts, path, max_clients=20, clients=counts.clients, of=counts.of)
        caption = f"Samples of each class on each client, seed {group.runs[0].seed} (GC-Fed, Figure 5)."
        yield Picture(path, "Partition", caption, group.federation)
