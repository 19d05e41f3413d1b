"""The cells of the tables of ``gcfed-lambda.md``, and the verdicts of its plan."""

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

LAMBDAS = ("0", "0.25", "0.5", "0.75", "1")
LONGEST = 200  # rounds of the plan
MEASURED = 50  # the last rounds, whose tests are averaged
WAYPOINTS = (50, 100)  # rounds


def by_borderline(runs: Runs) -> dict[str, StoredRun]:
    """The one run of each λ. ValueError if a λ has none or several."""
    return one_run_each(runs, {lam: [f"gc.lam={lam}"] for lam in LAMBDAS})


def accuracies(runs: Runs) -> dict[str, float]:
    """The plan's measure of each λ: the mean of the tests in the last fifty common rounds, in
    percent, as the page prints it.
    """
    found = by_borderline(runs)
    return means_of_last(found, common_round(found, LONGEST), MEASURED)


def by_round(runs: Runs) -> Cells:
    """Each λ on the way, at the end and above λ 0."""
    ends = accuracies(runs)
    cells: Cells = {}
    for lam, run in by_borderline(runs).items():
        way = [number(up_to(run, at, MEASURED)) for at in WAYPOINTS]
        above = None if lam == "0" else signed(less(ends, lam, "0"))
        cells[lam,] = [None, *way, number(ends[lam]), above]
    return cells


def outcomes(found: dict[str, float]) -> dict[str, Outcome]:
    """The four predictions of the plan, from the accuracies of the five λ in percent."""
    ranks = sorted(LAMBDAS, key=lambda lam: found[lam])
    best = ranks[-1]
    behind = less(found, best, "0.75")
    others = min(found[lam] for lam in LAMBDAS[1:])
    late = less(found, "0.75", "0.25")
    local = less(found, "1", "0")
    return {
        "1": Outcome(f"the lowest is λ {ranks[0]}", found["0"] < others),
        "2": Outcome(f"{number(behind)} below λ {best}", behind <= 1.5),
        "3": Outcome(signed(late), late > 0),
        "4": Outcome(signed(local), local >= 2),
    }


def predictions(runs: Runs) -> Cells:
    found = outcomes(accuracies(runs))
    return {(name,): [None, *outcome.row()] for name, outcome in found.items()}
