"""Who is ahead in a federation, by how much and how sure, over equal seeds."""

from itertools import product
from math import isnan

import numpy as np
import pandas as pd
import pytest
from run_folders import GCFED, run_of

from gcfed.report.groups import grouped
from gcfed.report.tables import Best, measured
from gcfed.report.verdict import equal_seeds, interval, main_measure, paired, verdict
from gcfed.runs.measures import Sample

LOCAL = {"tags.gc": "local", "gc._target_": "gcfed.methods.centralization.LocalGC"}


def runs(values, **config):
    """A run a seed from 1 on, which ends with the value."""
    return [run_of(seed=seed, values=(value,), **config) for seed, value in enumerate(values, start=1)]


def of(*parts):
    return verdict(grouped([run for part in parts for run in part]))


def table_of(found):
    """What the page shows of it: method, result, seeds, difference."""
    return measured(found.groups, [found.column.measure], "f", "F", found)


def test_the_permutation_test_by_hand():
    """Of the 16 sums ±1 ±2 ±3 ±4 two are 0, all others at least as far from 0 as 1 + 2 + 3 - 4 = 2."""
    first, second = Sample({1: 11.0, 2: 12.0, 3: 13.0, 4: 6.0, 9: 0.0}), Sample(dict.fromkeys((4, 3, 2, 1, 8), 10.0))
    pair, back = paired(first, second), paired(second, first)
    assert (pair.n, pair.difference, pair.p, back.difference, back.p) == (4, 0.5, 14 / 16, -0.5, 14 / 16)
    assert (back.low, back.high) == (-pair.high, -pair.low)
    equal = paired(second, second)
    assert (equal.difference, equal.low, equal.high, equal.p) == (0, 0, 0, 1)
    ten = paired(Sample({seed: 1.0 + seed for seed in range(10)}), Sample(dict.fromkeys(range(10), 0.0)))
    assert ten.p == 2 / 2**10  # all of one sign
    one, none = paired(Sample({1: 1.0}), Sample({1: 2.0})), paired(Sample({1: 1.0}), Sample({2: 2.0}))
    assert (one[:2], none.n) == ((1, -1.0), 0)
    assert np.isnan([*one[2:], *none[1:]]).all()


@pytest.mark.parametrize(("n", "t"), [(2, 12.7062), (3, 4.3027), (5, 2.7764), (10, 2.2622), (31, 2.0423)])
def test_the_interval_is_student_s(n, t):
    values = np.random.default_rng(n).normal(size=n)
    half = t * values.std(ddof=1) / n**0.5
    assert interval(values) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-4)
    assert isnan(interval(values[:1])[0])


def test_the_interval_covers_the_truth_in_95_of_100_cases():
    rng = np.random.default_rng(0)
    ends = np.array([interval(rng.normal(size=4)) for _ in range(2000)])
    assert np.mean((ends[:, 0] <= 0) & (ends[:, 1] >= 0)) == pytest.approx(0.95, abs=0.015)


def test_equal_seeds_are_those_that_compare_the_most():
    """Checked against all choices of methods."""
    rng = np.random.default_rng(1)
    for _ in range(25):
        values = pd.DataFrame(rng.random((5, 4))).where(rng.random((5, 4)) < 0.7)
        sizes = [
            values[list(chosen)].dropna().size
            for chosen in ([i for i in range(4) if bits[i]] for bits in product([0, 1], repeat=4))
            if len(chosen) > 1
        ]
        part = equal_seeds(values)
        assert not part.isna().any(axis=None)
        assert part.shape[1] > 1
        assert part.size >= 0.75 * max(sizes)  # intersections of two methods' seeds are tried, not of three
    values = pd.DataFrame({0: [1, 2, 3, 4.0], 1: [1, 2, 3, np.nan], 2: [np.nan, np.nan, np.nan, 9]})
    assert equal_seeds(values).shape == (3, 2)
    assert equal_seeds(values[[1, 2]]).empty


def test_the_best_is_compared_with_fedavg_seed_by_seed():
    fedavg, gcfed = (0.5, 0.6, 0.7), (0.54, 0.65, 0.73)
    found = of(runs(fedavg), runs(gcfed, **GCFED), runs((0.51, 0.62, 0.72), **LOCAL))
    assert [group.method for group in found.groups] == ["gcfed", "local", "fedavg"]
    assert found.headline == "gcfed +4.0 points over fedavg"
    assert found.sureness == "3 seeds, 95 % interval 1.5\u00a0to\u00a06.5; with 3 seeds p cannot be below 0.25"
    assert found.remarks == ["Next is local, 2.3 points behind, not told apart."]
    frame = table_of(found).frame
    assert [*frame] == ["method", "accuracy at the end (%)", "seeds", "against fedavg"]
    assert frame["accuracy at the end (%)"].tolist() == ["64.00 (9.54)", "61.67 (10.50)", "60.00 (10.00)"]
    assert [isinstance(cell, Best) for cell in frame["accuracy at the end (%)"]] == [True, False, False]
    assert frame["against fedavg"].str.replace("\u00a0", " ").tolist() == [
        "+4.0 (1.5 to 6.5)",
        "+1.7 (0.2 to 3.1)",
        "–",
    ]
    assert table_of(found).records["p"].tolist()[:2] == [0.25, 0.25]


def test_how_sure_depends_on_the_seeds():
    def sureness(n):
        return of(runs([0.5 + i / 100 for i in range(n)]), runs([0.6 + i / 90 for i in range(n)], **GCFED)).sureness

    assert sureness(1) == "one seed, which says nothing about chance"
    assert sureness(5).endswith("with 5 seeds p cannot be below 0.0625")
    assert sureness(6).endswith(", p = 0.031")
    assert sureness(17).startswith("17 seeds, 95 % interval 10.")  # too many signs to try
    assert " p " not in sureness(17)


def test_what_seeds_do_not_tell_apart_is_said():
    found = of(runs((0.5, 0.6, 0.7)), runs((0.6, 0.58, 0.72), **GCFED))
    assert found.remarks == ["These seeds do not tell the two apart."]


def test_only_equal_seeds_are_ranked():
    """A method that drew an easy seed alone is not the best; it stands below, without rank."""
    found = of(runs((0.5, 0.6, 0.7)), runs((0.55, 0.65, 0.74), **GCFED), runs((0.9,), **LOCAL))
    assert [group.method for group in found.groups] == ["gcfed", "fedavg", "local"]
    assert found.ranked == 2
    frame = table_of(found).frame
    assert frame["seeds"].tolist() == ["3", "3", "1"]
    assert isinstance(frame.iloc[0, 1], Best)
    assert table_of(found).records["ranked"].tolist() == ["yes", "yes", ""]
    assert frame["against fedavg"].tolist()[2] == "+40.0"  # over the seed that both have
    long = of(runs((0.5, 0.6, 0.7, 0.1)), runs((0.55, 0.65, 0.74), **GCFED))
    assert table_of(long).frame["accuracy at the end (%)"].tolist()[1] == "60.00 (10.00)"  # without the fourth


def test_without_a_seed_in_common_nothing_is_said():
    found = of([run_of(values=(0.5,))], [run_of(seed=2, values=(0.6,), **GCFED)])
    assert found.headline == "No two methods have a seed in common"
    assert not any(isinstance(cell, Best) for cell in table_of(found).frame.iloc[:, 1])
    assert of(runs((0.5, 0.6))) is None
    assert of(runs((0.5,)), [run_of("failed", values=(0.1,), **GCFED)]) is None


def test_a_method_that_failed_stands_below_with_the_reason():
    found = of(runs((0.5, 0.6)), runs((0.7, 0.8), **GCFED), [run_of("failed", values=(0.1,), **LOCAL)])
    assert table_of(found).frame.iloc[2].tolist() == ["local", "failed at seed 1", "0", "–"]


def test_who_is_ahead_by_another_measure_is_said():
    """At the end 50 % against 60 %, at best 80 % against 60 %."""
    fedavg = [run_of(seed=seed, values=(0.8, 0.5)) for seed in (1, 2)]
    found = of(fedavg, [run_of(seed=seed, values=(0.1, 0.6), **GCFED) for seed in (1, 2)])
    assert found.headline == "gcfed +10.0 points over fedavg"
    assert found.remarks == ["fedavg is ahead by best accuracy (80.00 to 60.00 %)."]


def test_fedavg_is_compared_with_the_next_where_it_is_the_best_and_the_best_where_there_is_none():
    found = of(runs((0.8, 0.9)), runs((0.7, 0.8), **GCFED), runs((0.5, 0.6), **LOCAL))
    assert (found.headline, found.remarks) == ("fedavg +10.0 points over gcfed", [])
    assert table_of(found).frame["against fedavg"].tolist()[0] == "–"
    found = of(runs((0.8, 0.9), **GCFED, **{"gc.lam": 0.5}), runs((0.7, 0.8), **GCFED, **{"gc.lam": 1}))
    assert found.headline == "gcfed, λ 0.5: +10.0 points over gcfed, λ 1"
    assert [*table_of(found).frame][-1] == "against gcfed, λ 0.5"
    rules = {
        rule: {"aggregator._target_": f"gcfed.aggregators.coordinates.{rule}"} for rule in ("Median", "TrimmedMean")
    }
    mean = {"aggregator._target_": "gcfed.federated.aggregate.MeanAggregator", "aggregator.weighting": "uniform"}
    found = of(*(runs((0.7,), **rule) for rule in rules.values()), runs((0.5,), **mean))
    assert found.groups[found.reference].method == "fedavg, mean"


def test_the_last_ten_rounds_decide_if_there_are_ten():
    tests = tuple(np.arange(10) / 10)
    ten, nine = run_of(values=tests), run_of(values=tests[:9], seed=2)
    assert main_measure(grouped([ten])) == "mean:test/acc[10]"
    assert main_measure(grouped([ten, nine])) == "last:test/acc"
    sparse = run_of(values=[v for test in tests for v in (np.nan, test)])  # tested every other round
    assert main_measure(grouped([sparse])) == "mean:test/acc[10]"
    found = of([sparse], [run_of(values=[0.1] * 20, **GCFED)])
    assert table_of(found).frame.iloc[0, 1] == "70.00"  # of 0.5 to 0.9
    lost = [run_of("diverged", values=(0.3, 0.1), **GCFED)]  # has no ten rounds, and counts with what it has
    assert table_of(of([sparse], lost)).frame.iloc[:, 1].tolist() == ["70.00", "20.00 †"]
    assert main_measure(grouped([run_of("failed", values=(0.5,))])) == "last:test/acc"


@pytest.mark.parametrize("column", ["test/relative_error", "test/rmse", "test/loss"])
def test_fewer_is_better_of_an_error(column):
    """A loss of half the squares knows less than what decides: it is the other way round here."""

    def regression(error, **config):
        run = run_of(**config)
        run.metrics.columns = ["test/loss"]
        run.metrics["test/loss"] = 1 - error
        run.metrics[column] = error
        return run

    found = of(*([regression(e, seed=s, **GCFED), regression(2 * e, seed=s)] for s, e in ((1, 0.011), (2, 0.013))))
    assert found.headline == "gcfed −0.012 against fedavg"
    assert table_of(found).frame.iloc[0, 1].startswith("0.012 ")


def test_all_measures_of_a_table_are_over_equal_seeds():
    found = of(runs((0.5, 0.6, 0.7, 0.1)), runs((0.55, 0.65, 0.74), **GCFED))
    table = measured(found.groups, [found.column.measure, "max:test/acc", "max:test/nothing"], "f", "F", found)
    assert [*table.frame][2:] == ["seeds", "against fedavg", "best accuracy (%)"]
    assert table.frame["best accuracy (%)"].tolist() == ["64.67 (9.50)", "60.00 (10.00)"]
    assert table.records["seeds"].tolist() == ["1 2 3"] * 4
    assert table.records["difference"].tolist()[:2] == pytest.approx([14 / 3, 0])
    assert table.records["difference"].isna().tolist() == [False, False, True, True]
