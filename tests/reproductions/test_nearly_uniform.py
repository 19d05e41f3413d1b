"""The verdicts of GC-Fed's Table 4 follow from its plan, and its numbers from the stored runs."""

import gzip
import re

import pandas as pd
import pytest
from matplotlib.figure import Figure
from planned import letters, seen

from gcfed.tables.reading import load
from gcfed.utils.resolvers import ROOT
from reproductions.results import figures, nearly_uniform
from reproductions.results.nearly_uniform import METHODS, verdicts
from reproductions.stored import StoredRun

OVERRIDES = {method: words for method, (*words, _) in METHODS.items()}
PAPER = {method: paper for method, (*_, paper) in METHODS.items()}


def test_the_papers_numbers_are_those_of_the_table_and_fulfil_the_plan():
    table = load("gcfed_table4")
    (column,) = [i for i, axis in enumerate(table.columns) if axis.label == "α 1.0, 5/100"]
    for method, paper in PAPER.items():
        assert table.cells[method][column][0] == paper
    assert letters(verdicts(PAPER)) == "hhhh"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"Global GC": 72.50}, "hhhh"),  # 1 point below FedAvg
        ({"Global GC": 72.49}, "fhhh"),
        ({"Local GC": 72.49, "FedDyn": 0, "SCAFFOLD": 0}, "fhhf"),
        ({"FedAvg": 76.73}, "hhhh"),  # GC-Fed is 2 points above
        ({"FedAvg": 76.74}, "hfhh"),
        ({"FedDyn": 78.73}, "hhfh"),  # a draw is not above
        ({"SCAFFOLD": 78.74}, "hhfh"),
        ({"Local GC": 80.73}, "hhhh"),
        ({"Local GC": 80.74}, "hhhf"),
        ({"Local GC": 76.72}, "hhhf"),
        ({"GC-Fed": 70.0}, "ffff"),
    ],
)
def test_each_prediction_can_fail_alone_and_its_border_belongs_to_it(changed, expected):
    assert letters(verdicts(PAPER | changed)) == expected


def test_a_verdict_names_what_was_compared():
    found = verdicts(PAPER)
    assert found["1"].row() == ["GC-Fed +5.23, Local GC +5.18, Global GC +3.05", "holds"]
    assert found["2"].seen == "+5.23"
    assert found["3"].seen == "SCAFFOLD +4.39, FedDyn +1.70"
    assert found["4"].seen == "+0.05"


def made_up(folder, rounds):
    """A run per method with a test in every second round: 0.1 % per round and 1 % per method.

    ``rounds`` has the last round of each.
    """
    runs = {}
    for place, (method, (algorithm, gc, _)) in enumerate(METHODS.items()):
        index = pd.RangeIndex(1, rounds[method] + 1, name="round")
        tests = pd.Series(0.001 * index + 0.01 * place, index).where(index % 2 == 0)
        path = folder / f"{place}.csv.gz"
        with gzip.open(path, "wt") as file:
            tests.to_frame("test/acc").to_csv(file)
        runs[method] = StoredRun(method, (algorithm, gc, "seed=1"), "0123abcd", path)
    return runs


def test_methods_are_compared_at_the_last_round_that_all_have(tmp_path):
    rounds = dict.fromkeys(METHODS, 300) | {"FedDyn": 187, "GC-Fed": 191}
    runs = made_up(tmp_path, rounds)
    assert nearly_uniform.PLAN.end(runs) == 187
    # the tests of rounds 178, 180, …, 186
    assert nearly_uniform.PLAN.accuracies(runs) == {
        method: pytest.approx(18.2 + place) for place, method in enumerate(METHODS)
    }
    cells = nearly_uniform.by_round(runs)
    assert cells["FedAvg",][:3] == ["1.60", "4.60", "9.60"]
    assert cells["FedAvg",][3:] == ["18.20", None, "73.50", None]
    assert cells["GC-Fed",][3:] == ["23.20", "+5.00", "78.73", "+5.23"]
    assert nearly_uniform.predictions(runs)["4",] == [None, None, "+1.00", "holds"]


def test_longer_runs_count_up_to_the_round_of_the_plan(tmp_path):
    runs = made_up(tmp_path, dict.fromkeys(METHODS, 250))
    assert nearly_uniform.PLAN.end(runs) == 200
    assert nearly_uniform.PLAN.accuracies(runs)["FedAvg"] == pytest.approx(19.6)


def test_the_figure_ends_at_the_common_round(tmp_path, monkeypatch):
    runs = made_up(tmp_path, dict.fromkeys(METHODS, 250) | {"Local GC": 120})
    monkeypatch.setattr(figures, "stored_runs", {"gcfed-table4": runs}.get)
    figure = Figure()
    figures.table4(figure)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [*METHODS]
    for place, line in enumerate(axes.lines):
        assert line.get_xdata()[-1] == 120
        assert line.get_ydata()[-1] == pytest.approx(11.6 + place)


RESULTS = ROOT / "reproductions/results"


def test_the_pages_say_what_the_stored_runs_have():
    end, found = seen("gcfed-table4", OVERRIDES, 10, 5)
    page = (RESULTS / "gcfed-table4.md").read_text()
    gain = f"{found['GC-Fed'] - found['FedAvg']:.1f}"
    lead = f"{found['FedDyn'] - found['GC-Fed']:.1f}"
    assert f"| {end} | above FedAvg |" in page
    assert f"After {end} of 800 rounds GC-Fed is {gain} points above FedAvg" in page
    assert f"{lead} points below FedDyn" in page
    (row,) = re.findall(r"^\| Does centralization gain in Table 4.*", index(), re.MULTILINE)
    assert f"after {end} of 800 rounds GC-Fed is {gain} points above FedAvg" in row
    assert f"and {lead} below FedDyn" in row
    (row,) = re.findall(
        r"^\| Table 4, nearly .*", (RESULTS / "coverage.md").read_text(), re.MULTILINE
    )
    assert f"all images, {end} of 800 rounds" in row


def index():
    return (RESULTS / "README.md").read_text()
