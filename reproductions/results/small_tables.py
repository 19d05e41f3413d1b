"""The cells of the tables of ``small-tables.md``.

A stored run is named ``<table>,<row>,<seed>``; spaces of the row's label are ``_``.
"""

from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

from gcfed.folders.measures import first_round
from reproductions.results.cells import ACCURACY, Cells, Runs, last_tests, listed, number
from reproductions.stored import StoredRun

TESTS = 5  # an accuracy is the mean of so many tests
FEDGC = ("fedgc_table1", "fedgc_table3")  # the paper has the best test of a run
CHANGES = "gcfed_table2"


def by_cell(runs: Runs) -> dict[tuple[str, str], list[StoredRun]]:
    """The runs of each (table, row), in the order of their seeds."""
    found = defaultdict(list)
    for name in sorted(runs):
        table, row, _ = name.split(",")
        found[table, row.replace("_", " ")].append(runs[name])
    return dict(found)


def accuracy(run: StoredRun) -> float:
    """The mean of the last five tests, in percent."""
    return last_tests(run, TESTS)


def best(run: StoredRun) -> float:
    """The best test, in percent."""
    return 100 * float(run.curve(ACCURACY).max())


def deviation(run: StoredRun) -> float:
    """The standard deviation of the change from one test to the next, in points."""
    return 100 * float(run.curve(ACCURACY).diff().std(ddof=0))


def largest_fall(run: StoredRun) -> float:
    """The smallest change from one test to the next, in points."""
    return 100 * float(run.curve(ACCURACY).diff().min())


def pair(own: list[StoredRun], measure: Callable[[StoredRun], float]) -> list[str | None]:
    """A measure of each seed, and its mean."""
    values = [measure(run) for run in own]
    return [listed(values), number(fmean(values), 1)]


def accuracies(runs: Runs) -> Cells:
    """The tables whose measure is the mean of the last tests."""
    found = by_cell(runs).items()
    return {cell: pair(own, accuracy) for cell, own in found if cell[0] not in FEDGC}


def best_tests(runs: Runs) -> Cells:
    found = by_cell(runs).items()
    return {cell: pair(own, best) for cell, own in found if cell[0] in FEDGC}


def changes(runs: Runs) -> Cells:
    """GC-Fed's Table 2."""
    cells: Cells = {}
    for (table, row), own in by_cell(runs).items():
        if table == CHANGES:
            cells[row,] = [*pair(own, deviation), *pair(own, largest_fall)]
    return cells


def costs(runs: Runs) -> Cells:
    """The rounds and the megabytes of FedGC's rows until FedAvg's best test, by seed."""
    found = by_cell(runs)
    targets = [best(run) for run in found["fedgc_table1", "FedAvg"]]
    cells: Cells = {}
    for (table, row), own in found.items():
        if table != "fedgc_table1":
            continue
        rounds = []
        sent = []
        for run, target in zip(own, targets, strict=True):
            reached = first_round(100 * run.curve(ACCURACY), target)
            rounds.append(str(reached or f"{run.metrics.index[-1]}+"))
            sent.append(f"{megabytes(run, reached):.0f}" + ("" if reached else "+"))
        cells[row,] = [", ".join(rounds), ", ".join(sent)]
    return cells


def megabytes(run: StoredRun, end: int | None) -> float:
    """What all clients send and receive up to a round; in all rounds without one."""
    of_rounds = run.metrics["comm/up_bytes"] + run.metrics["comm/down_bytes"]
    return float(of_rounds.loc[:end].sum()) / 1e6
