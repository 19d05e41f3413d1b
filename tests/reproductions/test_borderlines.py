"""The verdicts of the plan on λ follow from its words, and its numbers from the stored runs."""

import pytest
from matplotlib.figure import Figure
from planned import letters, seen

from gcfed.utils.resolvers import ROOT
from reproductions.results import borderlines, figures
from reproductions.results.borderlines import LAMBDAS, verdicts
from reproductions.stored import stored_runs

FULFILLED = {"0": 60.0, "0.25": 61.0, "0.5": 62.0, "0.75": 63.0, "1": 62.0}
OVERRIDES = {lam: [f"gc.lam={lam}"] for lam in LAMBDAS}
PAGE = ROOT / "reproductions/results/gcfed-lambda.md"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "hhhh"),
        ({"0": 61.5}, "fhhf"),
        ({"0.25": 60.0}, "fhhh"),  # a draw is not the lowest
        ({"0.5": 64.5}, "hhhh"),  # 1.5 points ahead of 0.75
        ({"0.5": 64.51}, "hfhh"),
        ({"0.25": 63.0}, "hhfh"),  # a draw is not above
        ({"1": 61.99}, "hhhf"),
    ],
)
def test_each_prediction_can_fail_alone_and_its_border_belongs_to_it(changed, expected):
    assert letters(verdicts(FULFILLED | changed)) == expected


def test_the_page_says_what_the_stored_runs_have():
    end, means = seen("gcfed-lambda", OVERRIDES, 50, 10)
    assert borderlines.PLAN.accuracies(stored_runs("gcfed-lambda")) == {
        lam: pytest.approx(mean, abs=0.0051) for lam, mean in means.items()
    }
    page = PAGE.read_text()
    assert f"| up to {end} |" in page
    best = max(LAMBDAS, key=lambda lam: means[lam])
    assert f"After {end} rounds λ {best} is ahead" in page


def test_the_figure_has_a_curve_for_each_borderline():
    figure = Figure()
    figures.borderlines_of(figure)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [f"λ {lam}" for lam in LAMBDAS]
    end, means = seen("gcfed-lambda", OVERRIDES, 50, 10)
    for lam, line in zip(LAMBDAS, axes.lines, strict=True):
        assert line.get_xdata()[-1] == end // 5 * 5
        assert line.get_ydata()[-1] == pytest.approx(means[lam], abs=0.01)
