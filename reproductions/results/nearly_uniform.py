"""The cells of the tables of ``gcfed-table4.md``, and the verdicts of its plan."""

from typing import NamedTuple

from reproductions.results.cells import Cells, Runs, number, signed, up_to
from reproductions.stored import StoredRun, chosen

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
    found = {}
    for method, (algorithm, gc, _) in METHODS.items():
        (found[method],) = chosen(runs, algorithm, gc)
    return found


def common_round(found: dict[str, StoredRun]) -> int:
    """The last round that all methods have, at most that of the plan."""
    ends = [int(run.metrics.index[-1]) for run in found.values()]
    return min(*ends, LONGEST)


def accuracies(runs: Runs) -> dict[str, float]:
    """The plan's measure of each method: the mean of the tests in the last ten common rounds, in
    percent, as the page prints it.
    """
    found = by_method(runs)
    end = common_round(found)
    return {method: round(up_to(run, end, MEASURED), 2) for method, run in found.items()}


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


class Outcome(NamedTuple):
    """What became of a prediction."""

    seen: str
    holds: bool

    def row(self) -> list[str | None]:
        return [self.seen, "holds" if self.holds else "fails"]


def outcomes(found: dict[str, float]) -> dict[str, Outcome]:
    """The four predictions of the plan, from the accuracies of the six methods in percent."""
    gains = {method: _less(found, method, "FedAvg") for method in CENTRALIZED}
    leads = {other: _less(found, "GC-Fed", other) for other in ("SCAFFOLD", "FedDyn")}
    apart = _less(found, "GC-Fed", "Local GC")
    return {
        "1": Outcome(_listed(gains), min(gains.values()) >= -1),
        "2": Outcome(signed(gains["GC-Fed"]), gains["GC-Fed"] >= 2),
        "3": Outcome(_listed(leads), min(leads.values()) > 0),
        "4": Outcome(signed(apart), abs(apart) <= 2),
    }


def _less(found: dict[str, float], method: str, other: str) -> float:
    """A difference of two printed numbers, without what their binary form adds."""
    return round(found[method] - found[other], 2)


def _listed(differences: dict[str, float]) -> str:
    return ", ".join(f"{method} {signed(value)}" for method, value in differences.items())


def predictions(runs: Runs) -> Cells:
    found = outcomes(accuracies(runs))
    return {(name,): [None, None, *outcome.row()] for name, outcome in found.items()}
