"""The verdicts of the plan on ResNet18 follow from its words, and its numbers from its runs."""

import pytest
from matplotlib.figure import Figure
from planned import letters, seen

from gcfed.utils.resolvers import ROOT
from reproductions.results import figures, group_norm
from reproductions.results.group_norm import METHODS, verdicts
from reproductions.stored import stored_runs

FULFILLED = {"FedAvg": 30.0, "Local GC": 33.0, "Global GC": 32.0, "GC-Fed": 34.0}
OVERRIDES = {method: [f"gc={gc}"] for method, gc in METHODS.items()}
PAGE = ROOT / "reproductions/results/resnet18-groupnorm.md"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "hhhhh"),
        ({"GC-Fed": 30.0, "Local GC": 30.5, "Global GC": 30.5}, "fhhhh"),  # a draw is not above
        ({"Local GC": 30.0}, "hfhhh"),
        ({"Global GC": 30.0}, "hhfhh"),
        ({"Local GC": 35.0}, "hhhhh"),  # GC-Fed is 1 point below
        ({"Global GC": 35.01}, "hhhfh"),
        ({"GC-Fed": 42.99}, "hhhhh"),
        ({"GC-Fed": 43.0}, "hhhhf"),
    ],
)
def test_each_prediction_can_fail_alone_and_its_border_belongs_to_it(changed, expected):
    assert letters(verdicts(FULFILLED | changed)) == expected


def test_the_page_says_what_the_stored_runs_have():
    end, means = seen("resnet18-groupnorm", OVERRIDES, 20, 10)
    assert group_norm.PLAN.accuracies(stored_runs("resnet18-groupnorm")) == {
        method: pytest.approx(mean, abs=0.0051) for method, mean in means.items()
    }
    assert f"| up to {end} |" in PAGE.read_text()


def test_the_figure_has_a_curve_for_each_method():
    figure = Figure()
    figures.resnet18(figure)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [*METHODS]
    end, means = seen("resnet18-groupnorm", OVERRIDES, 20, 10)
    for method, line in zip(METHODS, axes.lines, strict=True):
        assert line.get_xdata()[-1] == end // 2 * 2
        assert line.get_ydata()[-1] == pytest.approx(means[method], abs=0.01)
