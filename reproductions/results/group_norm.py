"""The cells of the tables of ``resnet18-groupnorm.md``, and the verdicts of its plan."""

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

METHODS = {"FedAvg": "none", "Local GC": "local", "Global GC": "global", "GC-Fed": "gcfed"}
PLAN = Comparison({method: [f"gc={gc}"] for method, gc in METHODS.items()}, measured=20, longest=60)
CENTRALIZED = ("GC-Fed", "Local GC", "Global GC")
LEAD_OF_CNN = 13  # points of GC-Fed above FedAvg with the CNN on the digits


def by_round(runs: Runs) -> Cells:
    """Each method in the first twenty rounds, at the end and above FedAvg."""
    ends = PLAN.accuracies(runs)
    cells: Cells = {}
    for method, run in PLAN.runs(runs).items():
        above = None if method == "FedAvg" else signed(less(ends, method, "FedAvg"))
        cells[method,] = [number(PLAN.at(run, 20)), number(ends[method]), above]
    return cells


def verdicts(found: dict[str, float]) -> dict[str, Verdict]:
    """The five predictions of the plan, from the accuracies of the four methods in percent."""
    leads = {method: less(found, method, "FedAvg") for method in CENTRALIZED}
    better = max(("Local GC", "Global GC"), key=lambda method: found[method])
    ahead = less(found, "GC-Fed", better)
    largest = max(leads, key=lambda method: leads[method])
    return {
        "1": Verdict(signed(leads["GC-Fed"]), leads["GC-Fed"] > 0),
        "2": Verdict(signed(leads["Local GC"]), leads["Local GC"] > 0),
        "3": Verdict(signed(leads["Global GC"]), leads["Global GC"] > 0),
        "4": Verdict(f"{signed(ahead)} to {better}", ahead >= -1),
        "5": Verdict(f"{largest} {signed(leads[largest])}", leads[largest] < LEAD_OF_CNN),
    }


def predictions(runs: Runs) -> Cells:
    return rows_of(verdicts(PLAN.accuracies(runs)))
