"""The cells of ``gcfed-table8.md`` for 100 rounds with filled batches."""

from collections.abc import Sequence
from statistics import fmean, stdev

from reproductions.results.cells import Cells, Runs, last, number
from reproductions.stored import chosen, seed_of

GC = {"GC-Fed": "gc=gcfed", "FedAvg": "gc=none"}
SEEDS = (1, 2, 3, 4)  # a column each
#: α and method → the accuracies of the page whose runs are not stored, in percent, by seed.
EARLIER = {
    ("1.0", "GC-Fed"): {1: 72.99, 2: 70.24},
    ("1.0", "FedAvg"): {1: 65.78, 2: 55.43},
    ("0.1", "GC-Fed"): {1: 60.8, 2: 54.65, 3: 62.37},
    ("0.1", "FedAvg"): {1: 46.4, 2: 43.29, 3: 50.42},
}


def hundred_rounds(runs: Runs) -> Cells:
    """The seeds with stored runs, and the mean of all seeds with their standard deviation."""
    cells: Cells = {}
    for (alpha, method), earlier in EARLIER.items():
        stored: dict[int, float] = {}
        for run in chosen(runs, GC[method], f"partition.alpha={alpha}"):
            stored[seed_of(run)] = round(last(run, 10), 2)
        row: list[str | None] = []
        for seed in SEEDS:
            row.append(number(stored[seed]) if seed in stored else None)
        row.append(mean_and_deviation([*(earlier | stored).values()]))
        cells[f"α {alpha}, {method}",] = [*row, None, None, None]
    return cells


def mean_and_deviation(values: Sequence[float]) -> str:
    return f"{number(fmean(values))} ({number(stdev(values))})"
