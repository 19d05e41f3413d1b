"""Draws partitions.png: how each partition deals the digits to 20 clients.

``python docs/images/partitions.py``
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gcfed.data.partition import IID, ClassesPerClient, Dirichlet, DirichletBalanced
from gcfed.data.sets.datasets import digits
from gcfed.data.skews import DirichletSizes, Shards
from gcfed.plots.style import BLUE, GREY, save, styled

CLIENTS, SEED = 20, 1
PARTITIONS = {
    "iid": IID(),
    "dirichlet, alpha=1": Dirichlet(1.0),
    "dirichlet, alpha=0.1": Dirichlet(0.1),
    "dirichlet, alpha=0.05": Dirichlet(0.05),
    "dirichlet_balanced, alpha=0.1": DirichletBalanced(0.1),
    "classes, classes=2": ClassesPerClient(2),
    "shards, shards=2": Shards(2),
    "sizes, alpha=0.5": DirichletSizes(0.5),
}


@styled
def gallery(path: Path) -> Figure:
    """One panel per partition.

    A bubble's area shows the samples of a class at a client, a bar the client's total.
    """
    labels = digits().train.y
    figure = Figure(figsize=(13, 8.4))
    outer = figure.add_gridspec(2, 4, hspace=0.32, wspace=0.22)
    for place, (title, partitioner) in zip(outer, PARTITIONS.items(), strict=True):
        counts_NC = partitioner(labels, CLIENTS, seed=SEED).label_counts(labels, 10)
        bars, bubbles = place.subgridspec(2, 1, height_ratios=[1, 3], hspace=0.08).subplots(
            sharex=True
        )
        bars.bar(range(CLIENTS), counts_NC.sum(1), color=GREY, width=0.7)
        bars.set(title=title, ylim=(0, 420), yticks=[0, 200, 400])
        clients, classes = np.nonzero(counts_NC)
        bubbles.scatter(
            clients,
            classes,
            s=1.6 * counts_NC[clients, classes],
            color=BLUE,
            alpha=0.85,
            linewidths=0,
        )
        bubbles.set(
            xlim=(-1, CLIENTS),
            ylim=(-0.8, 9.8),
            xticks=[0, 5, 10, 15],
            yticks=range(0, 10, 3),
            xlabel="client",
        )
        first = place.is_first_col()
        bars.set_ylabel("samples" * first)
        bubbles.set_ylabel("class" * first)
    save(figure, path)
    return figure


if __name__ == "__main__":
    gallery(Path(__file__).with_name("partitions.png"))
