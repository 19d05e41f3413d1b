"""The cells of the tables of ``gcfed-table4.md``, and the verdicts of its plan."""

from reproductions.results.cells import (
    Cells,
    Comparison,
    Runs,
    Verdict,
    less,
    number,
    rows_of,
    signed,
)

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
PLAN = Comparison({method: words for method, (*words, _) in METHODS.items()}, measured=10)
WAYPOINTS = (20, 50, 100)  # rounds


def by_round(runs: Runs) -> Cells:
    """Each method on the way, at the end and above FedAvg, and the paper's numbers."""
    ends = PLAN.accuracies(runs)
    cells: Cells = {}
    for method, run in PLAN.runs(runs).items():
        paper = METHODS[method][2]
        way = [number(PLAN.at(run, end)) for end in WAYPOINTS]
        row = [*way, number(ends[method]), None, number(paper), None]
        if method != "FedAvg":
            row[-3] = signed(less(ends, method, "FedAvg"))
            row[-1] = signed(paper - METHODS["FedAvg"][2])
        cells[method,] = row
    return cells


def verdicts(found: dict[str, float]) -> dict[str, Verdict]:
    """The four predictions of the plan, from the accuracies of the six methods in percent."""
    gains = {method: less(found, method, "FedAvg") for method in CENTRALIZED}
    leads = {other: less(found, "GC-Fed", other) for other in ("SCAFFOLD", "FedDyn")}
    apart = less(found, "GC-Fed", "Local GC")
    return {
        "1": Verdict(_listed(gains), min(gains.values()) >= -1),
        "2": Verdict(signed(gains["GC-Fed"]), gains["GC-Fed"] >= 2),
        "3": Verdict(_listed(leads), min(leads.values()) > 0),
        "4": Verdict(signed(apart), abs(apart) <= 2),
    }


def _listed(differences: dict[str, float]) -> str:
    return ", ".join(f"{method} {signed(value)}" for method, value in differences.items())


def predictions(runs: Runs) -> Cells:
    return rows_of(verdicts(PLAN.accuracies(runs)), given=2)
