"""The cells of the tables of ``gcfed-table4.md``, and the verdicts of its plan."""

from reproductions.results.cells import (
    Cells,
    Outcome,
    Runs,
    common_round,
    less,
    means_of_last,
    number,
    one_run_each,
    signed,
    up_to,
)
from reproductions.stored import StoredRun

#: The overrides of each method, and its accuracy in the paper after 800 rounds, in percent.
METHODS = {
    "FedAvg": ("algorithm=fedavg", "gc=none", 73.50),
    "SCAFFOLD": ("algorithm=scaffold", "gc=none", 74.34),
    "FedDyn": ("algorithm=feddyn", "gc=none", 77.03),
    "Global GC": ("algorithm=fedavg", "gc=global", 76.55),
    "Local GC": ("algorithm=fedavg", "gc=local", 78.68),
    "GC-Fed": ("algorithm=fedavg", "gc=gcfed", 78.73),
}
CENTRALIZED = ("GC-Fed", "Local GC", "Global GC")
LONGEST = 200  # rounds of the plan
MEASURED = 10  # the last rounds, whose tests are averaged
WAYPOINTS = (20, 50, 100)  # rounds


def by_method(runs: Runs) -> dict[str, StoredRun]:
    """The one run of each method. ValueError if a method has none or several."""
    return one_run_each(runs, {method: words for method, (*words, _) in METHODS.items()})


def accuracies(runs: Runs) -> dict[str, float]:
    """The plan's measure of each method: the mean of the tests in the last ten common rounds, in
    percent, as the page prints it.
    """
    found = by_method(runs)
    return means_of_last(found, common_round(found, LONGEST), MEASURED)


def by_round(runs: Runs) -> Cells:
    """Each method on the way, at the end and above FedAvg, and the paper's numbers."""
    ends = accuracies(runs)
    cells: Cells = {}
    for method, run in by_method(runs).items():
        paper = METHODS[method][2]
        way = [number(up_to(run, at, MEASURED)) for at in WAYPOINTS]
        row = [*way, number(ends[method]), None, number(paper), None]
        if method != "FedAvg":
            row[-3] = signed(ends[method] - ends["FedAvg"])
            row[-1] = signed(paper - METHODS["FedAvg"][2])
        cells[method,] = row
    return cells


def outcomes(found: dict[str, float]) -> dict[str, Outcome]:
    """The four predictions of the plan, from the accuracies of the six methods in percent."""
    gains = {method: less(found, method, "FedAvg") for method in CENTRALIZED}
    leads = {other: less(found, "GC-Fed", other) for other in ("SCAFFOLD", "FedDyn")}
    apart = less(found, "GC-Fed", "Local GC")
    return {
        "1": Outcome(_listed(gains), min(gains.values()) >= -1),
        "2": Outcome(signed(gains["GC-Fed"]), gains["GC-Fed"] >= 2),
        "3": Outcome(_listed(leads), min(leads.values()) > 0),
        "4": Outcome(signed(apart), abs(apart) <= 2),
    }


def _listed(differences: dict[str, float]) -> str:
    return ", ".join(f"{method} {signed(value)}" for method, value in differences.items())


def predictions(runs: Runs) -> Cells:
    found = outcomes(accuracies(runs))
    return {(name,): [None, None, *outcome.row()] for name, outcome in found.items()}
