"""Similarity of the clients' networks to the global one, layer by layer: GC-Fed's Figure 7 and FedACG's Figure 2c."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gcfed.report.groups import Group
from gcfed.report.panels import Drawn, grid, handles_of, legend, looks_of, outer_labels, room, select, title
from gcfed.report.series import Quantity, ended, mean_std, result_score
from gcfed.report.style import save, styled


def layers_of(groups: Sequence[Group]) -> list[str]:
    """Names of the layers of which CKA was measured, in the network's order."""
    columns = dict.fromkeys(name for group in groups for run in group.runs for name in run.columns)
    return [name.removeprefix("cka/") for name in columns if name.startswith("cka/")]


def cka_quantities(groups: Sequence[Group]) -> list[Quantity]:
    """A quantity a layer, for a figure over the rounds."""
    return [Quantity(f"cka/{layer}", f"CKA of {layer}") for layer in layers_of(groups)]


@styled
def plot_cka_by_layer(groups: Sequence[Group], path: Path) -> Drawn | None:
    """Linear CKA of client and broadcast model against the layer, mean over all rounds in which a run measured it."""
    members = [g for g in groups if any(len(ended(g, f"mean:cka/{layer}")) for layer in layers_of([g]))]
    if not members or len(layers_of(members)) < 2:
        return None
    chosen = select(members, result_score, most=room(len(members), minor=True))
    by_method = looks_of(groups, chosen.groups)
    figure, axes = grid(len(chosen.panels))
    for ax, panel in zip(axes, chosen.panels, strict=True):
        layers = layers_of(panel.groups)
        for i, group in enumerate(panel.groups):
            values = [ended(group, f"mean:cka/{layer}") for layer in layers]
            places = np.flatnonzero([len(its) for its in values])
            mean, std = np.array([mean_std(values[place]) for place in places]).T
            shift = 0.3 * ((i + 0.5) / len(panel.groups) - 0.5)
            style = by_method[group.method].line() | {"linewidth": 1.5}
            ax.errorbar(places + shift, mean, yerr=std, capsize=2, elinewidth=1, **style)
        ax.set_xticks(range(len(layers)), layers)
        if len(layers) > 4:
            ax.tick_params(axis="x", labelrotation=35)
        ax.set_ylim(top=min(ax.get_ylim()[1], 1.01))
        ax.set(xlabel="layer", ylabel="CKA (0 to 1)")
        title(ax, panel.title)
    outer_labels(axes)
    legend(figure, handles_of(chosen, by_method), inside=0)
    save(figure, path)
    return Drawn(
        figure,
        "Linear CKA of the clients' local models and the global model that they started from, on test samples: mean "
        "over the clients, over the measured rounds and over the seeds that came to their end, with bars of one "
        f"standard deviation over the seeds. {chosen.told}",
    )
