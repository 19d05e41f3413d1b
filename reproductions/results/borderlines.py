"""The cells of the tables of ``gcfed-lambda.md``, and the verdicts of its plan."""

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

LAMBDAS = ("0", "0.25", "0.5", "0.75", "1")
PLAN = Comparison({lam: [f"gc.lam={lam}"] for lam in LAMBDAS}, measured=50)
WAYPOINTS = (50, 100)  # rounds


def by_round(runs: Runs) -> Cells:
    """Each λ on the way, at the end and above λ 0."""
    ends = PLAN.accuracies(runs)
    cells: Cells = {}
    for lam, run in PLAN.runs(runs).items():
        way = [number(PLAN.at(run, end)) for end in WAYPOINTS]
        above = None if lam == "0" else signed(less(ends, lam, "0"))
        cells[lam,] = [None, *way, number(ends[lam]), above]
    return cells


def verdicts(found: dict[str, float]) -> dict[str, Verdict]:
    """The four predictions of the plan, from the accuracies of the five λ in percent."""
    ranks = sorted(LAMBDAS, key=lambda lam: found[lam])
    best = ranks[-1]
    behind = less(found, best, "0.75")
    others = min(found[lam] for lam in LAMBDAS[1:])
    late = less(found, "0.75", "0.25")
    local = less(found, "1", "0")
    return {
        "1": Verdict(f"the lowest is λ {ranks[0]}", found["0"] < others),
        "2": Verdict(f"{number(behind)} below λ {best}", behind <= 1.5),
        "3": Verdict(signed(late), late > 0),
        "4": Verdict(signed(local), local >= 2),
    }


def predictions(runs: Runs) -> Cells:
    return rows_of(verdicts(PLAN.accuracies(runs)))
