"""The cells of ``gcfed-table8.md`` for 100 rounds with filled batches."""

from collections.abc import Sequence
from statistics import fmean, stdev

from reproductions.results.cells import Cells, Runs, last, number
from reproductions.stored import chosen

GC = {"GC-Fed": "gc=gcfed", "FedAvg": "gc=none"}
#: The page's accuracies of seeds 1 and 2 at α 1.0, in percent. Their runs are not stored.
EARLIER = {"GC-Fed": (72.99, 70.24), "FedAvg": (65.78, 55.43)}


def hundred_rounds(runs: Runs) -> Cells:
    """Seed 3 at α 1.0, and the mean of the three seeds with their standard deviation."""
    cells: Cells = {}
    for method, gc in GC.items():
        (run,) = chosen(runs, gc, "partition.alpha=1.0", "seed=3")
        third = round(last(run, 10), 2)
        row: list[str | None] = [None, None, number(third)]
        row.append(mean_and_deviation([*EARLIER[method], third]))
        cells[f"α 1.0, {method}",] = [*row, None, None, None]
    return cells


def mean_and_deviation(values: Sequence[float]) -> str:
    return f"{number(fmean(values))} ({number(stdev(values))})"
