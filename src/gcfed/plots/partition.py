"""How the data lie on the clients of one run."""

from pathlib import Path
from typing import Any

from gcfed.data.label_counts import label_counts
from gcfed.report.figures import plot_partition


def draw_partition(folder: Path, data: Any) -> Path | None:
    """Draws ``partition.png`` and returns its path; None where there are no classes to draw."""
    if (held := label_counts(data)) is None:
        return None
    title = f"{data.dataset.name}, {data.partitioner}"
    plot_partition(held.counts, folder / "partition.png", title, clients=held.clients, of=held.of)
    return folder / "partition.png"
