"""Settings that differ in one number only: hyperparameters, and the share of clients that take part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcfed.report.groups import Group, federation_names, method_names
from gcfed.report.panels import Drawn, looks_of, room
from gcfed.report.points import Points, PointsPanel, plot_points, points_of
from gcfed.report.series import Quantity, measured, results_of
from gcfed.report.style import styled

NAMES = {
    "client.optimizer.lr": "client learning rate η",
    "client.optimizer.momentum": "client momentum",
    "client.optimizer.weight_decay": "weight decay",
    "client.epochs": "local epochs",
    "client.steps": "local steps",
    "client.batch_size": "batch size (samples)",
    "client.lr_decay": "decay of η a round",
    "server.lr": "server learning rate",
    "server.momentum": "server momentum",
    "participation.per_round": "clients a round",
    "participation.num_clients": "clients in all",
    "partition.alpha": "Dirichlet α",
    "partition.classes": "classes a client",
    "quantization.bits": "bits a number",
    "methods.proximal.mu": "proximal μ",
}
SUBSPACE = ("methods.ssf.ratio", "methods.fedsub.ratio")
ELSEWHERE = ("gc.lam", *SUBSPACE, "rounds", "eval_every")  # have a figure of their own, or are no hyperparameter


@dataclass(frozen=True)
class Sweep:
    """Groups that differ in the value of ``key`` only: ``x`` [n] ascending; ``rest`` is the setting that they share."""

    key: str
    rest: Mapping[str, Any]
    x: tuple[float, ...]
    groups: tuple[Group, ...]


def sweeps_of(groups: Iterable[Group], key: str) -> list[Sweep]:
    """All sets of two groups or more that differ in ``key``, a number, and in nothing else."""
    found: dict[str, dict[float, Group]] = defaultdict(dict)
    rests: dict[str, dict[str, Any]] = {}
    for group in groups:
        if is_number(group.setting.get(key)):
            rest = {k: v for k, v in group.setting.items() if k != key}
            name = repr(sorted(rest.items()))
            rests[name] = rest
            found[name][float(group.setting[key])] = group
    return [
        Sweep(key, rests[name], tuple(sorted(by_x)), tuple(by_x[x] for x in sorted(by_x)))
        for name, by_x in found.items()
        if len(by_x) > 1
    ]


def swept_keys(groups: Sequence[Group]) -> list[str]:
    """Keys with different numbers among otherwise equal groups; those of :data:`NAMES` first."""
    values: dict[str, set[Any]] = defaultdict(set)
    for group in groups:
        for key, number in group.setting.items():
            if is_number(number) and key not in ELSEWHERE:
                values[key].add(number)
    keys = [key for key, numbers in values.items() if len(numbers) > 1 and sweeps_of(groups, key)]
    return sorted(keys, key=lambda key: list(NAMES).index(key) if key in NAMES else len(NAMES))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def panels_of(groups: Sequence[Group], key: str, quantity: Quantity) -> list[PointsPanel]:
    """A panel a federation, with a series for each setting apart from the key."""
    found = [(sweep, points_of(zip(sweep.x, sweep.groups, strict=True), quantity)) for sweep in sweeps_of(groups, key)]
    known = [({**sweep.rest, key: "…"}, points) for sweep, points in found if points is not None]
    settings = [rest for rest, _ in known]
    series: dict[str, dict[str, Points]] = defaultdict(dict)
    for place, name, (_, points) in zip(federation_names(settings), method_names(settings), known, strict=True):
        series[place][name] = points
    return [PointsPanel(place, NAMES.get(key, key), quantity, its) for place, its in series.items()]


@styled
def plot_sweeps(groups: Sequence[Group], path: Path) -> Drawn | None:
    """The result against each hyperparameter that varies alone, a panel each (GC-Fed, Figure 10)."""
    panels = [
        panel
        for quantity, members in results_of(groups)
        for key in swept_keys(members)
        for panel in panels_of(members, key, quantity)
    ]
    what = "The result against one setting at a time, all others equal."
    return plot_points(panels, path, what, most=room(len(groups)), known=looks_of(groups, ())) if panels else None


@styled
def plot_participation(groups: Sequence[Group], path: Path) -> Drawn | None:
    """The partial update's gap to the update of all clients against the clients a round (GC-Fed, Figure 1b).

    Each run's gap is its mean over the rounds in which it was measured.
    """
    panels = []
    for column, label in (
        ("gap/l2", "‖Δₛ − Δₐₗₗ‖"),
        ("gap/relative", "‖Δₛ − Δₐₗₗ‖ / ‖Δₐₗₗ‖"),
        ("gap/cosine", "cosine of Δₛ and Δₐₗₗ"),
    ):
        quantity = Quantity(column, label, summed_up="mean:{}")
        panels += panels_of(measured(groups, column), "participation.per_round", quantity)
    what = (
        "How far the mean update of the cohort, Δₛ, is from the mean update of all clients, Δₐₗₗ, in the mean over the "
        "measured rounds, against the number of clients that take part."
    )
    return (
        plot_points(panels, path, what, most=room(len(groups), minor=True), known=looks_of(groups, ()))
        if panels
        else None
    )
