"""Which figures a report has, and of what; :mod:`gcfed.report.drawing` draws them."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gcfed.plots.partition import plot_partition
from gcfed.plots.style import PALETTE, save, styled
from gcfed.report import drawing
from gcfed.report.drawing import AGREEMENT, FAMILIES, LABELS, UPDATES
from gcfed.report.groups import Group, differing, label_of, sample, symbol, variants
from gcfed.report.searches import Search
from gcfed.report.tables import by_federation, describe, main_measure
from gcfed.runs.label_counts import LabelCounts

matplotlib.use("agg")  # seaborn imports pyplot, which would look for a display

FEDERATIONS, METHODS, MAPS = 6, 12, 4  # that are drawn: federations, methods of each, maps
Panels = Mapping[str, Callable[[Axes], str]]  # title → what draws it and returns the caption


class Picture(NamedTuple):
    """``file`` is the PNG; ``federation`` is what its runs have in common."""

    file: Path
    title: str
    caption: str
    federation: str


class Plot(NamedTuple):
    """A figure to come; ``height`` is a panel's, in inches."""

    name: str
    title: str
    federation: str
    panels: Panels
    height: float = 3.4


@styled
def draw(
    groups: Sequence[Group],
    searches: Mapping[Path, Search],
    folder: Path,
    formats: Sequence[str],
    failed: dict[str, str],
) -> list[Picture]:
    """Writes every figure that groups and searches have something for. ``failed`` takes the errors by the figures'
    titles."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = [replace(group, methods=tuple(map(_literal, group.methods))) for group in groups]
    suffixes = list(dict.fromkeys(["png", *formats]))
    pictures = []
    for plot in (*_plots(groups), *_of_searches(groups, searches)):
        files = [folder / f"{plot.name}.{suffix}" for suffix in suffixes]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # matplotlib's, of what cannot be read on the figure
                figure, caption = _drawn(plot)
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


def _literal(text: str) -> str:
    """Without formulas, in which matplotlib would find errors."""
    return text.replace("$", r"\$")


def _drawn(plot: Plot) -> tuple[Figure, str]:
    """The figure and the caption of its panels; of several they have one legend."""
    n = len(plot.panels)
    columns = 1 if n == 1 else 2 if n in (2, 4) else 3
    rows = -(-n // columns)
    figure = Figure(figsize=((5.4, 6.4, 8.4)[columns - 1], plot.height * rows))
    every = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    caption, legend = "", dict[str, Any]()
    for i, (axes, (title, panel)) in enumerate(zip(every, plot.panels.items(), strict=False)):
        caption = panel(axes)
        axes.set(title=title, **{"ylabel": ""} if i % columns else {})
        if n > 1 and (own := axes.get_legend()):
            legend |= {text.get_text(): line for text, line in zip(own.texts, own.legend_handles, strict=True)}
            own.remove()
    for axes in every[n:]:
        axes.remove()
    if legend:
        figure.legend([*legend.values()], [*legend], loc="outside lower center", ncols=4)
    return figure, caption


def _plots(groups: Sequence[Group]) -> Iterator[Plot]:
    colors = _colors(groups)
    for i, (place, members) in enumerate(list(by_federation(groups).items())[:FEDERATIONS], start=1):
        members = [group for group in members if any(len(run.metrics) for run in group.runs)]
        parts = _panels(members)
        shades = colors if "" in parts else _colors(chain(*parts.values()))
        members = _best(members)
        lines = sum(len(group.method) // 32 for group in members)  # more than one each, of long names
        columns = dict.fromkeys(name for group in members for run in group.runs for name in run.metrics)
        for column in columns:
            if column in LABELS or column.partition("/")[0] in FAMILIES.keys() - {"test"}:
                name, title = re.sub(r"\W+", "_", column), LABELS.get(column, column)
                panels = {which: partial(drawing.curves, part, column, shades) for which, part in parts.items()}
                yield Plot(f"{name}_{i}", title, place, panels, 3.4 + 0.12 * lines if "" in parts else 2.5)
        if "test/acc" in columns and (measure := _target(members)):
            plot = partial(drawing.bars, members, measure, colors)
            yield Plot(f"target_{i}", describe(measure)[0], place, {"": plot}, 1.2 + 0.3 * len(members) + 0.12 * lines)
        if "test/acc" in columns and len({*map(_sent, members)}) > 1:
            plot = partial(drawing.curves, members, "test/acc", colors, by_bytes=True)
            yield Plot(f"bytes_{i}", "Test accuracy by bytes", place, {"": plot}, 3.4 + 0.12 * lines)
        layers = [name for name in columns if name.startswith(AGREEMENT)]
        agreed = [g for g in members if any({*layers} & {*run.metrics} for run in g.runs)]
        for j, group in enumerate(agreed[:MAPS], start=1):
            plot = partial(drawing.agreement, group, layers)
            yield Plot(f"rho_{i}_{j}", f"Do clients agree? {group.method}", place, {"": plot}, 1.6 + 0.25 * len(layers))
        for j, group in enumerate([g for g in members if (g.runs[0].folder / UPDATES).is_file()][:MAPS], start=1):
            plot = partial(drawing.longest_updates, group)
            yield Plot(f"updates_{i}_{j}", f"The longest updates, {group.method}", place, {"": plot}, 4.2)
        layers = [name for name in columns if name.startswith("cka/")]
        if any(sample(group, f"mean:{layer}").values for group in members for layer in layers):
            plot = partial(drawing.layer_map, members, layers)
            yield Plot(f"cka_{i}", "Similarity by layer", place, {"": plot}, 1.6 + 0.4 * len(members))
    yield from _sweeps(groups, colors)


def _of_searches(groups: Sequence[Group], searches: Mapping[Path, Search]) -> Iterator[Plot]:
    """For each federation how the best value grew with the trials, a line a search."""
    for i, (place, members) in enumerate(by_federation(groups).items(), start=1):
        every = {run.folder.parent: (group, run) for group in members for run in group.runs}
        held = {folder: first for folder, first in every.items() if folder in searches and searches[folder].metric}
        firsts = [
            replace(group, runs=(run,), methods=(_literal(folder.name),)) for folder, (group, run) in held.items()
        ]
        parts = _panels(firsts)
        shades = _colors(chain(*parts.values()))
        panels = {which: partial(drawing.best_so_far, part, searches, shades) for which, part in parts.items()}
        if firsts:
            yield Plot(f"trials_{i}", "Best value against trials", place, panels, 3.4 if "" in parts else 2.5)


def _colors(groups: Iterable[Group]) -> dict[str, Any]:
    return {m: PALETTE[i % 7] for i, m in enumerate(dict.fromkeys(group.method for group in groups))}


def _panels(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The methods in one panel, or, where there are more than colours, the kinds of GC in a panel an algorithm."""
    parts: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        algorithm, gc = (_literal(label_of(group.runs[0], kind)) for kind in ("algorithm", "gc"))
        parts[algorithm].append(replace(group, methods=("no GC" if gc == "none" else gc,)))
    alike = all(len({group.method for group in part}) == len(part) for part in parts.values())
    return parts if alike and len(groups) >= max(8, 2 * len(parts)) else {"": _best(groups)}


def _best(groups: Sequence[Group]) -> list[Group]:
    """Those with the best result, as many as can be told apart, in their own order."""
    measure = main_measure(groups)
    results = pd.Series([sample(group, measure).mean for group in groups], dtype=float)
    ranks = results.rank(ascending=not describe(measure)[2], method="first", na_option="bottom")
    return [group for group, rank in zip(groups, ranks, strict=True) if rank <= METHODS]


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
            place = ", ".join(part for part in members[0].places if all(part in group.places for group in members))
            known = dict.fromkeys(part for group in members for part in group.methods)  # a name lacks what most have
            method = ", ".join(part for part in known if not part.startswith(f"{symbol(key)} "))
            # Against the clients a round: also how far their update is from that of all (GC-Fed, Figure 1b).
            gaps = [name for name in members[0].runs[0].metrics if name.startswith("gap/") and "per_round" in key]
            for measure in (main_measure(members), *(f"mean:{gap}" for gap in gaps)) if len(members) > 1 else ():
                for i in indices:
                    y = list(sample(ended[i], measure, describe(measure)[1].factor).values.values())
                    parts[place, measure].append(pd.DataFrame({"x": x[i], "y": y, "method": method}))
        for i, ((place, measure), points) in enumerate(parts.items(), start=1):
            plot = partial(drawing.against, pd.concat(points), key, measure, colors)
            yield Plot(f"{key}_{i}", f"{describe(measure)[0]} against {symbol(key)}", place, {"": plot})


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


def _sent(group: Group) -> str:
    """What a round of the method sends, roughly; the same text for methods that send the same."""
    run = next((run for run in group.runs if len(run.metrics)), group.runs[0])
    return f"{run.metrics.filter(regex='^comm/.*_bytes$').sum(axis=1).mean():.2g}"
