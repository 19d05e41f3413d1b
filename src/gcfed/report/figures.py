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
from textwrap import fill
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gcfed.plots.pictures import plot_partition
from gcfed.plots.style import LABELS, PALETTE, save, styled
from gcfed.report import drawing
from gcfed.report.drawing import AGREEMENT, FAMILIES, UPDATES
from gcfed.report.groups import Group, by_federation, grouped, label_of, symbol, variants
from gcfed.report.tables import Search
from gcfed.report.verdict import Verdict, main_measure
from gcfed.runs.folder import Run
from gcfed.runs.measures import LAST_ROUNDS, describe, sample
from gcfed.runs.reading import LabelCounts

FEDERATIONS, METHODS, MAPS = 6, 12, 4  # that are drawn: federations with all that they measured, methods of each, maps
Panels = Mapping[str, Callable[[Axes], str]]  # title → what draws it and returns the caption


class Plot(NamedTuple):
    """A figure; ``height`` is a panel's, in inches."""

    name: str
    title: str
    federation: str  # what its runs have in common
    panels: Panels | Callable[[], Figure]
    height: float = 3.0
    as_png: bool = False  # and in no other format, of which each takes longer than the PNG
    caption: str = ""  # known once it is drawn, but for a whole figure
    file: Path = Path()  # the PNG, once it is drawn


@styled
def draw(plots: Iterable[Plot], folder: Path, formats: Sequence[str], failed: dict[str, str]) -> list[Plot]:
    """Writes the figures, and returns those that it could draw; ``failed`` takes the errors by the others' titles."""
    drawn = []
    for plot in plots:
        suffixes = dict.fromkeys(["png"] if plot.as_png else ["png", *formats])
        files = [folder / f"{plot.name}.{suffix}" for suffix in suffixes]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # matplotlib's, of what cannot be read on the figure
                figure, caption = (
                    (plot.panels(), plot.caption) if callable(plot.panels) else _drawn(plot.panels, plot.height)
                )
                for path in files:
                    save(figure, path)
        except Exception as error:  # whatever it is, it must not cost the other figures and the tables
            failed[f"{plot.title}, {plot.federation}"] = f"{type(error).__name__}: {error}"
            for path in files:
                path.unlink(missing_ok=True)
        else:
            drawn.append(plot._replace(caption=caption, file=files[0]))
    return drawn


def _drawn(panels: Panels, height: float) -> tuple[Figure, str]:
    """The figure of the panels, which have one legend, below them, and their caption."""
    n = len(panels)
    columns = 1 if n == 1 else 2 if n in (2, 4) else 3
    rows = -(-n // columns)
    width = (4.8, 6.4, 8.4)[columns - 1]
    figure = Figure(figsize=(width, height * rows))
    every = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    caption, legend = "", dict[str, Any]()
    for i, (axes, (title, panel)) in enumerate(zip(every, panels.items(), strict=False)):
        caption = panel(axes)
        axes.set(title=title, ylabel="" if i % columns else fill(axes.get_ylabel(), 32))
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    for axes in every[n:]:
        axes.remove()
    if legend:
        labels = [fill(label, 48) for label in legend]
        abreast = min(len(labels), max(1, int(12 * width) // (7 + max(map(len, labels)))))
        lines = 1 + max(label.count("\n") for label in labels)
        figure.set_figheight(height * rows + 0.2 * lines * -(-len(labels) // abreast))
        figure.legend([*legend.values()], labels, loc="outside lower center", ncols=abreast)
    return figure, caption


def plots(groups: Sequence[Group], verdicts: Mapping[str, Verdict], detailed: int = FEDERATIONS) -> list[Plot]:
    """Who is ahead in each federation that compares settings; of so many federations all that they measured, and
    what came out against each number that varies alone."""
    everywhere, found = _colors(groups), list[Plot]()
    for i, (place, members) in enumerate(by_federation(groups).items(), start=1):
        shown = [group for group in members if any(len(run.metrics) for run in group.runs)]
        best = {}
        if decided := verdicts.get(place):
            ranked = zip(decided.groups, decided.samples, strict=True)
            best = dict([(group, s) for group, s in ranked if s.values][:METHODS])
            begun = [group for group in shown if not group.ended][: METHODS - len(best)]
            shown = [group for group in shown if group in best or group in begun]
        colors = {group.method: everywhere[group.method] for group in shown}
        if len({*colors.values()}) < len(colors):  # two of these have one colour, which they have everywhere
            colors = _colors(shown)
        if decided:
            lines = {group.method: (group, s) for group, s in best.items()}
            plot = partial(drawing.seeds, lines, decided.column, colors)
            found.append(Plot(f"comparison_{i}", "Who is ahead", place, {"": plot}, _height(lines), i > detailed))
        if i <= detailed:
            found += _measured(i, place, shown, colors)
    return [*found, *_sweeps(groups, everywhere)]


def _measured(i: int, place: str, groups: Sequence[Group], colors: dict[str, Any]) -> Iterator[Plot]:
    """Whatever these methods of a federation measured, over the rounds; and the cost of a target accuracy."""
    columns = dict.fromkeys(name for group in groups for run in group.runs for name in run.metrics)
    parts, height = _panels(groups)
    shades = colors if "" in parts else _colors(chain(*parts.values()))
    smoothed = main_measure(groups) == LAST_ROUNDS
    for column in columns:
        if column in LABELS or column.partition("/")[0] in FAMILIES.keys() - {"test"}:
            name, title = re.sub(r"\W+", "_", column), LABELS.get(column, column)
            panels = {
                which: partial(drawing.curves, part, column, shades, smoothed=smoothed and column == "test/acc")
                for which, part in parts.items()
            }
            yield Plot(f"{name}_{i}", title, place, panels, height)
    # What a round of each sends, roughly: equal for methods that send the same.
    sent = {f"{drawing.sent(next((run for run in g.runs if len(run.metrics)), g.runs[0])).mean():.2g}" for g in groups}
    if "test/acc" in columns and (measure := _target(groups, in_bytes=len(sent) > 1)):
        target = describe(measure)
        costs = {group.method: (group, target.of(group.runs)) for group in groups}
        plot = partial(drawing.seeds, costs, target, colors)
        yield Plot(f"target_{i}", target.title, place, {"": plot}, _height(costs))
    if "test/acc" in columns and len(sent) > 1:
        plot = partial(drawing.curves, groups, "test/acc", colors, smoothed=smoothed, by_bytes=True)
        yield Plot(f"bytes_{i}", "Test accuracy by bytes", place, {"": plot})
    layers = [name for name in columns if name.startswith(AGREEMENT)]
    agreed = [g for g in groups if any({*layers} & {*run.metrics} for run in g.runs)]
    for j, group in enumerate(agreed[:MAPS], start=1):
        plot = partial(drawing.agreement, group, layers)
        yield Plot(f"rho_{i}_{j}", f"Do clients agree? {group.method}", place, {"": plot}, 1.6 + 0.25 * len(layers))
    for j, group in enumerate([g for g in groups if (g.runs[0].folder / UPDATES).is_file()][:MAPS], start=1):
        plot = partial(drawing.longest_updates, group)
        yield Plot(f"updates_{i}_{j}", f"The longest updates, {group.method}", place, {"": plot}, 4.2)
    layers = [name for name in columns if name.startswith("cka/")]
    if any(sample(group.runs, f"mean:{layer}").values for group in groups for layer in layers):
        plot = partial(drawing.layer_map, groups, layers)
        yield Plot(f"cka_{i}", "Similarity by layer", place, {"": plot}, 1.6 + 0.4 * len(groups))


def of_searches(trials: Mapping[Run, Path], searches: Mapping[Path, Search]) -> Iterator[Plot]:
    """For each federation how the best value grew with the trials, a line a search."""
    held = {run: folder for run, folder in trials.items() if folder in searches and searches[folder].metric}
    firsts = {folder: run for run, folder in held.items()}.values()
    for i, (place, members) in enumerate(by_federation(grouped(firsts)).items(), start=1):
        every = [(group, run) for group in members for run in (*group.runs, *group.repeated)]
        lines = [replace(group, runs=(run,), methods={"search": held[run].name}) for group, run in every]
        parts, height = _panels(lines)
        shades, panels = _colors(chain(*parts.values())), {}
        for which, part in parts.items():
            grown = {group.method: searches[held[group.runs[0]]] for group in part}
            panels[which] = partial(drawing.best_so_far, grown, shades)
        yield Plot(f"trials_{i}", "Best value against trials", place, panels, height)


def _colors(groups: Iterable[Group]) -> dict[str, Any]:
    return {m: PALETTE[i % 7] for i, m in enumerate(dict.fromkeys(group.method for group in groups))}


def _height(methods: Mapping[str, Any]) -> float:
    """Of a line a method, where long names take more than one, in inches."""
    return 0.8 + sum(0.22 + 0.16 * (len(method) // 22) for method in methods)


def _panels(groups: Sequence[Group]) -> tuple[dict[str, list[Group]], float]:
    """The methods in one panel, or, where there are more than colours, the kinds of GC in a panel an algorithm; and the
    height of a panel."""
    parts: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        algorithm, gc = (label_of(group.runs[0], kind) for kind in ("algorithm", "gc"))
        parts[algorithm].append(replace(group, methods={"gc": "no GC" if gc == "none" else gc}))
    alike = all(len({group.method for group in part}) == len(part) for part in parts.values())
    return (parts, 2.4) if alike and len(groups) >= max(8, 2 * len(parts)) else ({"": list(groups)}, 3.0)


def _target(groups: Sequence[Group], *, in_bytes: bool) -> str:
    """The highest target that half of several methods reached."""
    for target in sorted({float(t) for g in groups for t in g.runs[0].get("targets") or ()}, reverse=True):
        samples = [sample(group.runs, f"rounds:test/acc>={target:g}") for group in groups]
        if len(groups) > 1 and 2 * sum(bool(s.values) and not s.bound for s in samples) >= len(groups):
            return f"bytes_to_target/{target:g}" if in_bytes else f"rounds:test/acc>={target:g}"
    return ""


def _sweeps(groups: Sequence[Group], colors: dict[str, Any]) -> Iterator[Plot]:
    """A figure for each number in which groups differ that are equal in all else."""
    ended = [group for group in groups if group.ended]
    every = pd.DataFrame([group.texts for group in ended], dtype=object)
    for key in variants(every).columns.difference(["rounds", "eval_every"]):
        x = pd.to_numeric(every[key], errors="coerce").dropna()
        same = [name for name in every if every[name].equals(every[key])]  # the same number under another name
        rest = pd.Series([*map(tuple, every.drop(columns=same).to_numpy())], dtype=object)
        parts: dict[tuple[str, str], list[pd.DataFrame]] = defaultdict(list)
        for indices in (indices for indices in x.groupby(rest).groups.values() if len(indices) > 1):
            members = [ended[i] for i in indices]
            first = members[0].places.items()
            place = ", ".join(text for part, text in first if all(g.places.get(part) == text for g in members))
            # A name lacks what most of its federation have.
            method = ", ".join({k: text for g in members for k, text in g.methods.items() if k != key}.values())
            # Against the clients a round: also how far their update is from that of all (GC-Fed, Figure 1b).
            gaps = [name for name in members[0].runs[0].metrics if name.startswith("gap/") and "per_round" in key]
            for measure in (main_measure(members), *(f"mean:{gap}" for gap in gaps)):
                for i in indices:
                    y = list(describe(measure).of(ended[i].runs).values.values())
                    parts[place, measure].append(pd.DataFrame({"x": x[i], "y": y, "method": method}))
        for i, ((place, measure), points) in enumerate(parts.items(), start=1):
            plot = partial(drawing.against, pd.concat(points), key, measure, colors)
            yield Plot(f"{key}_{i}", f"{describe(measure).title} against {symbol(key)}", place, {"": plot})


def partitions(groups: Iterable[Group]) -> list[Plot]:
    """How the data lie on the clients, each partition once (GC-Fed, Figure 5)."""
    held: dict[bytes, Plot] = {}
    for group in groups:
        if counts := LabelCounts.load(group.runs[0].folder):
            figure = partial(plot_partition, counts, None, max_clients=20)
            caption = f"Samples of each class on each client, seed {group.runs[0].seed} (GC-Fed, Figure 5)."
            plot = Plot(f"partition_{len(held) + 1}", "Partition", group.federation, figure, caption=caption)
            held.setdefault(counts.counts.tobytes(), plot)
    return [*held.values()][:FEDERATIONS]
