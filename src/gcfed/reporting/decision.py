"""By which column the methods of a comparison are judged, and which cannot be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcfed.folders.columns import GLOBAL_TESTS, global_test
from gcfed.folders.folder import FINISHED, Run
from gcfed.folders.measures import OWN_TESTS, measure_of

Runs = Mapping[str, Sequence[Run]]  # of each method


@dataclass(frozen=True)
class Decision:
    """How the methods of a comparison are judged."""

    measure: str
    #: Why a method cannot be compared with the others, by its name.
    not_compared: Mapping[str, str]
    #: Methods whose clients use other models than the global one, by the column of their result.
    declared: Mapping[str, str]


def decide(methods: Runs) -> Decision:
    """Chooses the column that judges most of these methods, from the runs that have ended.

    It is the global model's test, unless a method declares another column as its result. Then it is
    that column if more methods have it. A method is judged by the global model's test only if it
    declares nothing else.
    """
    columns = {name for runs in methods.values() for run in runs for name in run.metrics}
    usual = global_test(columns)
    declared = _declared(methods)
    candidates = [usual, *dict.fromkeys(declared.values())]
    fitting = {column: _judged_by(column, methods, declared) for column in candidates}
    chosen = max(candidates, key=lambda column: len(fitting[column]))  # the first of equals
    not_compared: dict[str, str] = {}
    for method, runs in methods.items():
        has_ended = any(run.has_ended for run in runs)
        if has_ended and method not in fitting[chosen]:
            not_compared[method] = _why_not_compared(method, chosen, methods, declared)
    rounds = []
    for method in fitting[chosen]:
        for run in methods[method]:
            if run.state == FINISHED and chosen in run.metrics:
                rounds.append(run.rounds)
    return Decision(measure_of(chosen, rounds), not_compared, declared)


def _declared(methods: Runs) -> dict[str, str]:
    """The columns that methods declare as their result, if it is not the global model's test."""
    declared: dict[str, str] = {}
    for method, runs in methods.items():
        results = [run.result for run in runs if run.result]
        if results:
            declared[method] = results[-1]
    return declared


def _judged_by(column: str, methods: Runs, declared: Mapping[str, str]) -> list[str]:
    """The methods that have this column and declare no other."""
    usual = column if column not in GLOBAL_TESTS else ""
    fitting = []
    for method, runs in methods.items():
        fits = declared.get(method, usual) == usual
        if fits and _has(column, runs):
            fitting.append(method)
    return fitting


def _has(column: str, runs: Sequence[Run]) -> bool:
    return any(run.has_ended and len(run.curve(column)) > 0 for run in runs)


def _why_not_compared(method: str, chosen: str, methods: Runs, declared: Mapping[str, str]) -> str:
    """Why a method is not judged by the chosen column."""
    result = declared.get(method, chosen)
    if not _has(result, methods[method]):
        whose = "its result" if method in declared else "the result of the other methods"
        why = f"{method} did not measure {result}, {whose}"
    else:
        lacking = [other for other, runs in methods.items() if not _has(result, runs)]
        if not lacking:
            return f"{method} is judged by {result}, and the other methods by {chosen}"
        others = listed(lacking)
        why = f"{method} is judged by {result}, which {others} did not measure"
    return f"{why} ({OWN_TESTS} measures it)" if result.startswith("personal/") else why


def listed(names: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
