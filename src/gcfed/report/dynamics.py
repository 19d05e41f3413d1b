"""What was measured, over the communication rounds: accuracy with its target, losses, drift, angles, anything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gcfed.report.curves import ROOMY, curves_told, draw_curves, draw_target
from gcfed.report.groups import Group
from gcfed.report.panels import (
    Drawn,
    Panel,
    grid,
    handles_of,
    legend,
    looks_of,
    outer_labels,
    room,
    rounds_axis,
    select,
    title,
)  # fmt: skip
from gcfed.report.series import ACCURACY, ERROR, Quantity, drawing, measured, result_score, score, target_of
from gcfed.report.style import save, styled

#: Columns with their units, by the family that a figure shows together.
FAMILIES: dict[str, tuple[Quantity, ...]] = {
    "loss": (Quantity("train/loss", "training loss (nats)"), Quantity("test/loss", "test loss (nats)")),
    "drift": (
        Quantity("drift/client_norm", "mean ‖Δₖ‖"),
        Quantity("drift/update_norm", "‖mean Δₖ‖"),
        Quantity("drift/relative", "mean ‖Δₖ‖ / ‖w‖ (%)", 100),
        Quantity("drift/divergence", "divergence of the Δₖ"),
        Quantity("drift/cosine", "mean cosine to the mean"),
    ),
    "angle": (
        Quantity("angle/server", "angle to the last step (°)"),
        Quantity("angle/above_90", "clients above 90° (%)", 100),
        Quantity("angle/update", "angle to the update (°)"),
    ),
    "gap": (
        Quantity("gap/l2", "‖Δₛ − Δₐₗₗ‖"),
        Quantity("gap/relative", "‖Δₛ − Δₐₗₗ‖ / ‖Δₐₗₗ‖"),
        Quantity("gap/cosine", "cosine of Δₛ and Δₐₗₗ"),
    ),
    "forgetting": (
        Quantity("forgetting/before", "loss before training (nats)"),
        Quantity("forgetting/after", "loss after training (nats)"),
        Quantity("forgetting/own", "loss on own data (nats)"),
        Quantity("forgetting/others", "loss on others' data (nats)"),
    ),
    "clients": (
        Quantity("clients/acc_before", "own accuracy before (%)", 100),
        Quantity("clients/acc_after", "own accuracy after (%)", 100),
        Quantity("clients/loss_before", "own loss before (nats)"),
        Quantity("clients/loss_after", "own loss after (nats)"),
    ),
    "leakage": (
        Quantity("leakage/mse", "MSE of pixels in 0 to 1", log=True),
        Quantity("leakage/psnr", "PSNR (dB)"),
        Quantity("leakage/labels", "labels recovered (%)", 100),
        Quantity("leakage/mismatch", "mismatch of gradients", log=True),
    ),
    "fedgc": (
        Quantity("fedgc/cgc_layers", "tensors projected (%)", 100),
        Quantity("fedgc/sgc_active", "clients that bind"),
        Quantity("fedgc/sgc_failed", "without a solution"),
    ),
}
ELSEWHERE = ("train", "test", "comm", "time", "cka")  # families with figures of their own, or with none


@styled
def plot_dynamics(groups: Sequence[Group], path: Path, *, window: int | None = None) -> Drawn | None:
    """Test accuracy over the rounds, a panel a federation, with targets (GC-Fed, Figures 4 and 6; FedGC, 2 and 3).

    Args:
        window: tests of the trailing mean; by default 10, fewer for runs with fewer than 50 tests.
    """
    return _plot_result(groups, path, ACCURACY, window, "Test accuracy of the global model over the rounds.")


@styled
def plot_errors(groups: Sequence[Group], path: Path) -> Drawn | None:
    """The relative error of regressions over the rounds (SSF, Figures 1 to 3)."""
    return _plot_result(groups, path, ERROR, 1, "Distance of the global model to the optimum over the rounds.")


def _plot_result(
    groups: Sequence[Group], path: Path, quantity: Quantity, window: int | None, what: str
) -> Drawn | None:
    members = measured(groups, quantity.column)
    if not members:
        return None
    chosen = select(members, partial(score, quantity=quantity), most=room(len(members)))
    by_method = looks_of(groups, chosen.groups)
    figure, axes = grid(len(chosen.panels))
    drawn, targets = [], []
    for ax, panel in zip(axes, chosen.panels, strict=True):
        parts = [drawing(group, quantity, window=window, raw=len(panel.groups) <= ROOMY) for group in panel.groups]
        draw_curves(ax, parts, quantity, by_method)
        target = target_of(parts) if quantity is ACCURACY else None
        if target:
            draw_target(ax, parts, by_method, *target)
            targets.append(target)
        rounds_axis(ax)
        title(ax, panel.title)
        drawn += parts
    outer_labels(axes)
    legend(figure, handles_of(chosen, by_method))
    save(figure, path)
    marked = (
        "Dotted: an accuracy to reach, named at the right (the highest of the runs' targets that half of the curves "
        "reach, FedAvg's peak where there is none), and the round in which each curve first does."
    )
    return Drawn(figure, " ".join([what, curves_told(drawn), *([marked] if targets else []), chosen.told]))


def families_of(groups: Sequence[Group]) -> dict[str, tuple[Quantity, ...]]:
    """What of :data:`FAMILIES` was measured, then every other family of columns, under the columns' own names."""
    columns = dict.fromkeys(name for group in groups for run in group.runs for name in run.columns)
    found = {name: tuple(q for q in family if q.column in columns) for name, family in FAMILIES.items()}
    named = {quantity.column for family in FAMILIES.values() for quantity in family}
    for column in columns:
        family, slash, _ = column.partition("/")
        if slash and column not in named and family not in ELSEWHERE:
            found[family] = (*found.get(family, ()), Quantity(column, column))
    return {name: family for name, family in found.items() if family}


@styled
def plot_measured(
    groups: Sequence[Group], path: Path, *, quantities: Sequence[Quantity], what: str = "", one_scale: bool = False
) -> Drawn | None:
    """Columns over the rounds: a panel a column, and a row of panels a federation, as many rows as fit.

    Args:
        quantities: what to draw; those that no group measured are left out.
        what: the first sentence of the caption.
        one_scale: whether all panels have the same y axis.
    """
    quantities = [q for q in quantities if measured(groups, q.column)][:12]
    if not quantities:
        return None
    members = [g for g in groups if any(measured([g], q.column) for q in quantities)]
    chosen = select(members, result_score, most=max(1, room(len(members), minor=True) // len(quantities)))
    by_method = looks_of(groups, chosen.groups)
    cells = [(panel, _unit(q, panel)) for panel in chosen.panels for q in quantities]
    figure, axes = grid(len(cells), columns=len(quantities) if len(chosen.panels) > 1 else None)
    drawn = []
    for ax, (panel, quantity) in zip(axes, cells, strict=True):
        parts = [drawing(group, quantity) for group in measured(panel.groups, quantity.column)]
        draw_curves(ax, parts, quantity, by_method)
        rounds_axis(ax)
        title(ax, panel.title)
        drawn += parts
    if one_scale:
        lows, highs = zip(*(ax.get_ylim() for ax in axes), strict=True)
        for ax in axes:
            ax.set_ylim(min(lows), max(highs))
    outer_labels(axes)
    legend(figure, handles_of(chosen, by_method))
    save(figure, path)
    return Drawn(figure, " ".join(filter(None, [what, curves_told(drawn), chosen.told])))


def _unit(quantity: Quantity, panel: Panel) -> Quantity:
    """The loss of a regression, which has no accuracies, is no cross-entropy."""
    if quantity in FAMILIES["loss"] and not measured(panel.groups, ACCURACY.column):
        return replace(quantity, label=quantity.label.replace("(nats)", "(squared error / 2)"))
    return quantity
