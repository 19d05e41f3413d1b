"""Which methods lead, by how much, and how certain this is.

All methods are compared over their common seeds.
"""

import re
from math import inf, isnan

import numpy as np
import pandas as pd
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from run_folders import GCFED, run_of
from scipy import stats

from gcfed.reporting.build import MORE_MEASURES
from gcfed.reporting.frame import frame_of
from gcfed.reporting.student import paired_p, rejected_by_holm
from gcfed.reporting.tables import comparison, targets
from gcfed.reporting.verdict import (
    compare_methods,
    family_size,
    fedavg_of,
    interval,
    judge,
    scale_of,
)

SCAFFOLD = {
    "tags.algorithm": "scaffold",
    "methods.scaffold._target_": "gcfed.methods.correction.scaffold.Scaffold",
}
LOCAL = {"tags.gc": "local", "gc._target_": "gcfed.methods.centralization.LocalGC"}
FEDAVG = (0.5, 0.6, 0.7)
BETTER = (0.54, 0.65, 0.73)


def runs(values, **config):
    """One run for each value, which is its last accuracy. Seeds count from 1."""
    return [
        run_of(seed=seed, values=(value,), **config) for seed, value in enumerate(values, start=1)
    ]


def of(*parts):
    return judge(frame_of([run for part in parts for run in part]))


def table_of(*parts, measures=()):
    rows = frame_of([run for part in parts for run in part])
    return comparison(judge(rows), rows, measures, "c", "P")


@pytest.mark.parametrize(("n", "t"), [(2, 12.7062), (3, 4.3027), (10, 2.2622), (31, 2.0423)])
def test_the_interval_equals_students_t(n, t):
    values = np.random.default_rng(n).normal(size=n)
    half = t * values.std(ddof=1) / n**0.5
    assert interval(values) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-4)
    assert isnan(interval(values[:1])[0])


@pytest.mark.parametrize(
    ("parts", "headline"),
    [
        (
            [runs(FEDAVG), runs(BETTER, **GCFED)],
            "gcfed leads, +4.0 points over fedavg (1.5 to 6.5)",
        ),
        (
            [runs(FEDAVG), runs((0.6, 0.58, 0.72), **GCFED)],
            "No method leads clearly; gcfed +3.3 points over fedavg (−11.8 to 18.5), uncertain",
        ),
        (  # only the second-best method is clearly above FedAvg
            [
                runs(FEDAVG),
                runs((0.5, 0.622, 0.744), **SCAFFOLD),
                runs((0.51, 0.614, 0.718), **GCFED),
            ],
            (
                "scaffold and gcfed lead; gcfed +1.4 points over fedavg (0.4 to 2.4), scaffold"
                " +2.2, uncertain"
            ),
        ),
        (
            [runs(BETTER), runs(FEDAVG, **GCFED)],
            "fedavg leads; gcfed −4.0 points against fedavg (−6.5 to −1.5)",
        ),
        (
            [runs(FEDAVG), [run_of(seed=s, values=(0.9,), **GCFED) for s in (3, 4, 5)]],
            "Not ranked: this needs 3 seeds that methods share",
        ),
        ([runs((0.5, 0.6))], "fedavg: test accuracy 55.00 %"),
        ([[run_of("failed", values=(0.1,))]], "fedavg: no result yet"),
    ],
)
def test_the_headline_agrees_with_the_intervals(parts, headline):
    assert of(*parts).headline == headline


def width(latex):
    """The width of a LaTeX table in points: a Times font of 9 points, 6 points
    between the columns.
    """
    rows = [line.rstrip("\\ ").split("&") for line in latex.splitlines() if line.endswith(r"\\")]
    words = [
        [re.sub(r"\\textbf|\\pm|\\lambda|[${}\\~]", " ", cell).strip() for cell in row]
        for row in rows
    ]
    size = {"size": 9, "prop": FontProperties(family="STIXGeneral")}
    widths = [[TextPath((0, 0), word, **size).get_extents().width for word in row] for row in words]
    return sum(map(max, zip(*widths, strict=True))) + 6 * (len(rows[0]) - 1)


def test_a_number_that_rounds_to_nothing_has_no_sign_of_its_own():
    scale = scale_of("test/acc", [])
    texts = [scale.text(gap, "+") for gap in (-0.00001, 0.00001, -0.01, inf)]
    assert texts == ["+0.00", "+0.00", "−1.00", "+inf"]
    assert scale.text(-0.00001) == "0.00"


def test_a_method_that_diverged_leaves_the_others_their_digits():
    found = [*runs((inf, inf, inf), **LOCAL), *runs((0.0031, 0.0032, 0.0033))]
    for run in found:
        run.metrics["test/loss"] = run.metrics.pop("test/acc")
    scale = of(found).scale
    assert scale.title == "test loss"
    assert scale.digits == scale_of("test/loss", [0.0032]).digits == 6


def test_tables_for_papers_fit_one_column_of_two():
    run = {"targets": [0.1, 0.2, 0.3, 0.4], "rounds": 30}
    parts = [
        [
            run_of(seed=seed, values=(value,) * 30, **run, **method)
            for seed, value in enumerate(FEDAVG, start=1)
        ]
        for method in ({}, {"labels.algorithm": "SCAFFOLD + GC-Fed", "client.optimizer.lr": 0.5})
    ]
    rows = frame_of([run for part in parts for run in part])
    found = judge(rows)
    for table in (
        comparison(found, rows, ["best:test/acc"], "c", "P"),
        targets(found, rows, "t", "T"),
    ):
        assert 100 < width(table.latex) < 234, table.latex  # ICML's column; IEEE's has 252
    for one in rows["run"]:
        one.summary["result"] = "personal/local_acc"
        one.metrics["personal/local_acc"] = one.metrics["test/acc"]
    found = judge(rows)
    assert found.measure == "last10:personal/local_acc"
    assert width(comparison(found, rows, [], "c", "P").latex) < 234


def test_personalised_metrics_have_columns():
    run = run_of()
    run.metrics["personal/global_acc"] = 0.4
    run.metrics["personal/local_acc"] = 0.7
    rows = frame_of([run])
    cells = comparison(judge(rows), rows, MORE_MEASURES, "c", "P").frame.iloc[0]
    assert cells["accuracy of the global model at clients (%)"] == "40.00"
    assert cells["accuracy of clients' own models (%)"] == "70.00"


def test_bytes_have_columns_only_if_the_methods_differ():
    def sent(down, up, **config):
        run = run_of(**config)
        run.metrics["comm/down_bytes"] = down
        run.metrics["comm/up_bytes"] = up
        return run

    def columns(*sizes):
        methods = zip(sizes, ({}, GCFED), strict=True)
        rows = frame_of([sent(*size, **method) for size, method in methods])
        found = comparison(judge(rows), rows, MORE_MEASURES, "c", "P")
        return [name for name in found.frame if name.startswith("sent")]

    assert columns((1e6, 1e6), (1e6, 1e6)) == []
    assert columns((1e6, 1e6), (1e6, 2e6)) == ["sent by clients (MB)"]
    alone = frame_of([sent(1e6, 1e6)])
    cells = comparison(judge(alone), alone, MORE_MEASURES, "c", "P").frame
    assert "sent by clients (MB)" in cells


def test_one_function_gives_means_intervals_and_paired_differences():
    rng = np.random.default_rng(1)
    values = pd.DataFrame(rng.random((5, 3)), index=[1, 2, 3, 5, 8], columns=["a", "b", "c"])
    values.loc[[2, 8], "b"] = np.nan
    values.loc[[1, 2, 3, 8], "c"] = np.nan
    table = compare_methods(values, "a")
    assert table["n"].tolist() == table["pairs"].tolist() == [5, 3, 1]
    ours = values["b"].dropna()
    theirs = values["a"][ours.index]
    of_mean = stats.t.interval(0.95, 2, ours.mean(), stats.sem(ours))
    of_pairs = stats.ttest_rel(ours, theirs)
    wanted = {
        "mean": ours.mean(),
        "std": ours.std(),
        "low": of_mean[0],
        "high": of_mean[1],
        "difference": (ours - theirs).mean(),
        "from": of_pairs.confidence_interval().low,
        "to": of_pairs.confidence_interval().high,
        "p": of_pairs.pvalue,
    }
    assert table.loc["b", [*wanted]].to_dict() == pytest.approx(wanted, rel=1e-9)
    assert table.loc["c", "difference"] == values.loc[5, "c"] - values.loc[5, "a"]
    assert table.loc["c", ["low", "high", "from", "to"]].isna().all()
    assert compare_methods(values)["pairs"].tolist() == [0, 0, 0]


def test_differences_are_taken_seed_by_seed_and_leaders_are_bold():
    table = table_of(runs(FEDAVG), runs(BETTER, **GCFED), runs((0.51, 0.62, 0.72), **LOCAL))
    assert table.frame.to_dict("list") == {
        "method": ["gcfed", "local", "fedavg"],
        "test accuracy (%)": ["64.00 ± 9.54", "61.67 ± 10.50", "60.00 ± 10.00"],
        "against fedavg": ["+4.00 (1.52 to 6.48)*", "+1.67 (0.23 to 3.10)*", "–"],
        "seeds": [3, 3, 3],
    }
    assert table.bold == [True, True, False]  # local does not differ clearly from the best
    assert r"\textbf{gcfed} & 64.00 $\pm$ 9.54 & +4.00 (1.52 to 6.48)* \\" in table.latex
    assert table.frame.shape[1] > 3 == table.latex.splitlines()[8].count("&") + 1


def test_one_run_of_another_fedavg_does_not_take_the_reference_away():
    """It renames FedAvg to its setting. Two ranked variants have no common name, so the results
    choose.
    """
    twice = {"client.epochs": 2}
    parts = [runs(FEDAVG, **{"client.epochs": 5}), runs(BETTER, **GCFED, **{"client.epochs": 5})]
    found = of(*parts, runs((0.9,), **twice))
    assert found.reference == "fedavg, epochs 5"
    assert found.headline == "gcfed leads, +4.0 points over fedavg, epochs 5 (1.5 to 6.5)"
    assert family_size(["gcfed", "moon", "fedavg, epochs 5"], "fedavg, epochs 5") == 2
    assert family_size(["fedavg, epochs 5", "fedavg, epochs 2"], "fedavg, epochs 5") == 1
    assert fedavg_of(["fedavg, epochs 5", "fedavg, epochs 2"]) == ""
    assert fedavg_of(["fedavg, epochs 5", "FedAvg"]) == "FedAvg"
    assert fedavg_of(["fedavg + Mine", "fedavgm"]) == ""


def test_the_place_of_a_single_round():
    assert set(frame_of([run_of(values=(0.5,), rounds=1)])["place"].str[-9:]) == {", 1 round"}


@pytest.mark.parametrize(
    ("gains", "marks"),
    [
        ([(0.04, 0.05, 0.03), (0.01, 0.02, 0.02)], ["*", "*"]),  # p 0.020 and 0.038
        ([(0.02, 0.04, 0.04), (0.01, 0.02, 0.02)], ["", ""]),  # twice p 0.038
        ([(0.02, 0.04, 0.04)], [""]),  # a single difference needs no correction
    ],
)
def test_marked_differences_stand_after_holms_correction(gains, marks):
    methods = [GCFED, LOCAL][: len(gains)]
    parts = [runs(FEDAVG)]
    for gains_of_method, method in zip(gains, methods, strict=True):
        values = [value + gain for value, gain in zip(FEDAVG, gains_of_method, strict=True)]
        parts.append(runs(values, **method))
    table = table_of(*parts)
    texts = table.frame["against fedavg"].tolist()
    assert [text.partition(")")[2] for text in texts[:-1]] == marks
    notes = " ".join(table.notes)
    corrected = "after Holm's correction (5 %) for the 2 differences."
    assert (f"*: differs from fedavg also {corrected}" in notes) == ("*" in marks)
    assert (f"No difference to fedavg stands {corrected}" in notes) == (marks == ["", ""])
    legend = "; *: differs from fedavg also after Holm's correction}"
    assert (legend in table.latex) == ("*" in marks)


def test_without_fedavg_holms_correction_counts_all_pairs():
    """The results choose the best method as the reference, so one p of 2 % is not enough."""
    gains = ((0.0, 0.0, 0.0), (-0.04, -0.05, -0.03), (-0.2, -0.3, -0.1))  # p 0.020 and 0.074
    methods = (GCFED, LOCAL, {"tags.algorithm": "scaffold", "methods.scaffold._target_": "x.S"})
    parts = []
    for gains_of_method, method in zip(gains, methods, strict=True):
        values = [value + gain for value, gain in zip(FEDAVG, gains_of_method, strict=True)]
        parts.append(runs(values, **method))
    table = table_of(*parts)
    assert [text for text in table.frame["against gcfed"] if text.endswith("*")] == []
    words = "Holm's correction (5 %) for all 3 pairs, because the best method is the reference"
    assert words in " ".join(table.notes)


@pytest.mark.parametrize(
    ("ps", "family", "rejected"),
    [
        ({}, 0, []),
        ({"a": 0.05}, 1, ["a"]),
        ({"a": 0.03, "b": 0.01, "c": 0.02}, 3, ["b", "c", "a"]),  # 5 %/3, 5 %/2 and 5 %
        ({"a": 0.04, "b": 0.01, "c": 0.03}, 3, ["b"]),  # 0.03 > 5 %/2: 0.04 is not compared
        ({"a": 0.02, "b": 0.02, "c": 0.02}, 3, []),
        ({"a": 1.0, "b": 0.0}, 2, ["b"]),
        ({"a": 0.02, "b": 0.01}, 3, ["b", "a"]),  # 5 %/3 and 5 %/2
        ({"a": 0.03, "b": 0.01}, 6, []),  # 5 %/6
    ],
)
def test_holm_compares_the_smallest_p_with_the_smallest_level(ps, family, rejected):
    assert rejected_by_holm(ps, family) == rejected


def test_the_p_of_paired_differences_is_students():
    differences = np.random.default_rng(3).normal(0.3, size=7)
    assert paired_p(differences) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert paired_p([0.25, 0.25, 0.25]) == 0.0
    assert paired_p([0.0, 0.0]) == paired_p([0.3]) == paired_p([inf, 1.0]) == 1.0


def test_a_method_with_fewer_than_three_seeds_is_listed_below():
    """A method with a single easy seed does not lead.

    A fourth seed of only one method does not count.
    """
    found = of(runs((*FEDAVG, 0.1)), runs(BETTER, **GCFED), runs((0.9,), **LOCAL))
    assert found.ranked == ["gcfed", "fedavg"]
    assert found.seeds == [1, 2, 3]
    assert [*found.table.index] == ["gcfed", "fedavg", "local"]
    assert found.table["mean"].tolist() == pytest.approx([0.64, 0.6, 0.9])
    assert found.table["difference"].isna().tolist() == [False, False, True]


def test_the_table_shows_how_runs_ended_and_what_differs():
    moon = {"tags.algorithm": "moon", "client.optimizer.lr": 0.5}
    private = {"privacy._target_": "gcfed.methods.upload.client_dp.ClientDP"}
    lost = [run_of("failed", values=(0.1,), **moon)]
    table = table_of(
        runs(FEDAVG, **private),
        [*runs(BETTER[:2], **GCFED), run_of("diverged", seed=3, values=(0.1,), **GCFED)],
        lost,
    )
    assert table.frame.iloc[:, 1].tolist() == ["60.00 ± 10.00", "43.00 ± 29.10 †", "failed"]
    assert "Not ranked, with fewer than 3 common seeds: moon." in table.notes
    assert "Different η: 0.01 (fedavg, gcfed); 0.5 (moon)." in table.notes
    assert "Different privacy: none (gcfed, moon); ClientDP (fedavg)." in table.notes


def test_the_last_ten_rounds_decide_if_they_are_a_third_of_the_run():
    tests = tuple(np.arange(30) / 30)
    long = run_of(values=tests)
    short = run_of(values=tests[:29], seed=2)
    assert of([long]).measure == "last10:test/acc"
    assert of([long, short]).measure == "final:test/acc"
    assert of([run_of("failed", values=tests)]).measure == "final:test/acc"
    assert of([long]).direction == "Test accuracy, last 10 rounds (%), higher is better"


@pytest.mark.parametrize(
    ("column", "title"), [("test/relative_error", "relative error"), ("test/rmse", "RMSE")]
)
def test_a_lower_error_is_better(column, title):
    def regression(error, **config):
        run = run_of(**config)
        run.metrics.columns = ["test/loss"]
        run.metrics["test/loss"] = 1 - error  # must not decide
        run.metrics[column] = error
        return run

    errors = {1: 0.011, 2: 0.0132, 3: 0.0121}
    found = of(
        *([regression(e, seed=s, **GCFED), regression(2 * e, seed=s)] for s, e in errors.items())
    )
    assert (
        found.headline
        == f"gcfed leads, −0.01210 {title} against fedavg (−0.01483 to −0.00937), lower is better"
    )
    assert found.direction == f"{title[0].upper()}{title[1:]}, lower is better"
    assert of([regression(0.145)]).headline == f"fedavg: {title} 0.1450, lower is better"
    assert found.scale.text(0.0121) == "0.01210"


def test_the_table_has_the_four_highest_reached_targets():
    reached = run_of(values=(0.2, 0.6), targets=[0.1, 0.15, 0.2, 0.3, 0.5, 0.9])
    rows = frame_of([reached, run_of(seed=2, values=(0.9, 0.2)), run_of(**GCFED, values=(0.2,))])
    table = targets(judge(rows), rows, "t", "T")
    assert [*table.frame] == ["method", *(f"rounds to {t}\u00a0%" for t in (20, 30, 50, 90))]
    assert table.frame.iloc[:, 3].tolist() == ["2 ± 1", "1+"]
    assert table.frame.iloc[0, 4] == "2+"  # a run that missed it counts with all its rounds
    lost = frame_of([reached, run_of("failed", seed=2, values=(0.1,))])  # it counts nowhere
    assert targets(judge(lost), lost, "t", "T").frame.iloc[0, 3] == "2"
    low = frame_of([run_of(values=(0.2,), targets=[0.5])])
    assert targets(judge(low), low, "t", "T") is None
