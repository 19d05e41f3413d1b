"""The result against the dimension of a random subspace: SSF's Figure 2 and Table 3."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gcfed.report.groups import Group, federation_names, method_name, method_names
from gcfed.report.panels import Drawn, looks_of, room
from gcfed.report.points import PointsPanel, plot_points, points_of
from gcfed.report.series import Quantity, ended, mean_std, results_of
from gcfed.report.style import styled
from gcfed.report.sweeps import SUBSPACE, Sweep, sweeps_of

FULL = ("SCAFFOLD", "FedAvg")


@styled
def plot_subspace(groups: Sequence[Group], path: Path) -> Drawn | None:
    """The result of SSF and FedSub against r/d, beside SCAFFOLD and FedAvg, which send everything."""
    panels = [panel for quantity, members in results_of(groups) for panel in _panels(members, quantity)]
    if not panels:
        return None
    what = "The result against the dimension r of the random subspaces, as a share of the dimension d of the weights."
    drawn = plot_points(panels, path, what, most=room(len(groups), minor=True), known=looks_of(groups, ()))
    flat = " Horizontal: methods without a subspace." if any(panel.levels for panel in panels) else ""
    return Drawn(drawn.figure, drawn.caption + flat)


def _panels(groups: Sequence[Group], quantity: Quantity) -> list[PointsPanel]:
    by_place: dict[str, list[Sweep]] = defaultdict(list)
    for key in SUBSPACE:
        for sweep in sweeps_of(groups, key):
            by_place[sweep.groups[0].federation].append(sweep)
    titles = federation_names([sweeps[0].groups[0].setting for sweeps in by_place.values()])
    panels = []
    for text, (place, sweeps) in zip(titles, by_place.items(), strict=True):
        names = method_names([sweep.rest for sweep in sweeps])
        found = [points_of(zip(sweep.x, sweep.groups, strict=True), quantity) for sweep in sweeps]
        series = {name: points for name, points in zip(names, found, strict=True) if points is not None}
        full = [g for g in groups if g.federation == place and method_name(g.setting) in FULL]
        values = [ended(group, quantity.measure, quantity.factor) for group in full]
        levels = {
            name: mean_std(its)
            for name, its in zip(method_names([group.setting for group in full]), values, strict=True)
            if len(its)
        }
        if series:
            panels.append(PointsPanel(text, "subspace dimension r/d", quantity, series, levels))
    return panels
