"""Accuracy against the borderline λ between Local and Global GC: GC-Fed's Figure 9."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcfed.report.groups import Group, federation_names, method_names
from gcfed.report.panels import Drawn, looks_of, room
from gcfed.report.points import Points, PointsPanel, plot_points, points_of
from gcfed.report.series import Quantity, results_of
from gcfed.report.style import styled

BOTH, LOCAL = "Local GC up to λ, and Global GC", "Local GC up to λ only"
_WHERE = ("gc.lam", "gc.boundary", "gc._target_", "gc.local", "gc.server")  # the rest are options that both share


@styled
def plot_lambda(groups: Sequence[Group], path: Path) -> Drawn | None:
    """The result against λ, with Global GC on the update (GC-Fed) and without (Local GC of the first tensors only).

    The ends need no runs of their own: GC-Fed with λ = 0 is Global GC, Local GC up to λ = 0 is no GC, and λ = 1 is
    Local GC for both.
    """
    lines = [(quantity, *line) for quantity, members in results_of(groups) for line in _lines(members, quantity)]
    if not lines:
        return None
    bases = [base for _, base, _, _ in lines]
    names, places = method_names(bases), federation_names(bases)
    panels: dict[tuple[str, str], PointsPanel] = {}
    for (quantity, _, kind, points), name, place in zip(lines, names, places, strict=True):
        panel = panels.setdefault(
            (place, quantity.column), PointsPanel(place, "borderline λ (share of the tensors)", quantity, {})
        )
        panel.series[kind if len(set(names)) == 1 else f"{name}: {kind}"] = points
    what = "The result against the share λ of the tensors that get Local GC, with Global GC on the update and without."
    drawn = plot_points(
        list(panels.values()), path, what, most=room(len(groups), minor=True), known=looks_of(groups, ())
    )
    ends = (
        " Where λ = 0 or 1 was not run, gc=global and gc=local stand for it, and gc=none for Local GC up to 0: "
        "they are the same."
    )
    return Drawn(drawn.figure, drawn.caption + ends)


def _lines(groups: Sequence[Group], quantity: Quantity) -> list[tuple[dict[str, Any], str, Points]]:
    """(setting without GC, which of the two, points) of each series with two values of λ or more."""
    bases: dict[str, dict[str, Any]] = {}
    by_lam: dict[tuple[str, str, str], dict[float, Group]] = defaultdict(dict)
    ends: dict[tuple[str, str, str], dict[float, Group]] = defaultdict(dict)
    for group in groups:
        setting = group.setting
        base = {k: v for k, v in setting.items() if not k.startswith("gc.")} | {"tags.gc": "none"}
        name, lam, gc = repr(sorted(base.items())), setting.get("gc.lam"), setting.get("tags.gc")
        options = repr(sorted((k, v) for k, v in setting.items() if k.startswith("gc.") and k not in _WHERE))
        bases[name] = base
        if lam is not None and gc in ("gcfed", "local"):
            by_lam[name, BOTH if gc == "gcfed" else LOCAL, options][float(lam)] = group
        elif gc == "global":
            ends[name, BOTH, options][0.0] = group
        elif gc == "local" and "gc.boundary" not in setting:
            ends[name, BOTH, options][1.0] = ends[name, LOCAL, options][1.0] = group
        elif gc == "none":
            ends[name, LOCAL, ""][0.0] = group
    lines = []
    for (name, kind, options), found in by_lam.items():
        others = ends[name, kind, ""] | ends[name, kind, options]
        points = points_of((others | found).items(), quantity) if len(found) > 1 else None
        if points is not None:
            lines.append((bases[name], kind, points))
    return lines
