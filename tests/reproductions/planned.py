"""What a planned comparison shows, computed without the functions of the pages."""

from collections.abc import Mapping

from reproductions.results.cells import Verdict
from reproductions.stored import stored_runs


def letters(verdicts: Mapping[str, Verdict]) -> str:
    """A letter for each prediction: h if it holds, else f."""
    return "".join("h" if verdict.holds else "f" for verdict in verdicts.values())


def seen(page, overrides, rounds, count):
    """The last common round, and each name's mean of the tests in the last ``rounds``, in percent.

    Args:
        overrides: name → those of its one run.
        count: number of these tests.
    """
    runs = stored_runs(page).values()
    end = min(int(run.metrics.index.max()) for run in runs)
    means = {}
    for name, words in overrides.items():
        (run,) = [run for run in runs if {*words} <= {*run.overrides}]
        curve = run.metrics["test/acc"].dropna()
        tests = curve[(curve.index > end - rounds) & (curve.index <= end)]
        assert len(tests) == count
        means[name] = 100 * tests.mean()
    return end, means
