"""Welch's test gives scipy's numbers."""

import math

import pytest
from scipy import stats

from gcfed.reporting.student import quantile, two_sided_p
from gcfed.tables.ranking import Sample, compare_means


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sample(55.24, 1.27, 3), Sample(52.22, 0.90, 3)),
        (Sample(59.37, 7.34, 3), Sample(66.44, 1.40, 3)),
        (Sample(60.6, 7.3, 2), Sample(62.5, 1.24, 3)),
        (Sample(33.09, 1.37, 10), Sample(28.86, 2.22, 10)),
        (Sample(1.0, 0.0, 5), Sample(2.0, 0.5, 3)),
    ],
)
def test_two_means_have_the_p_of_scipy(ours, theirs):
    expected = stats.ttest_ind_from_stats(*ours, *theirs, equal_var=False)
    found = compare_means(ours, theirs)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.value == ours.mean - theirs.mean


def test_a_single_run_has_the_printed_deviation():
    found = compare_means(Sample(67.12, None, 1), Sample(62.50, 1.24, 3))
    t = 4.62 / (1.24 * math.sqrt(1 + 1 / 3))
    assert found.p == pytest.approx(2 * stats.t.sf(t, 2), rel=1e-9)


@pytest.mark.parametrize(
    "theirs", [Sample(62.5, None, 3), Sample(62.5, 1.24, 1), Sample(62.5, 0.0, 3)]
)
def test_a_mean_without_a_deviation_is_not_tested(theirs):
    assert compare_means(Sample(67.12, None, 1), theirs) is None


@pytest.mark.parametrize("freedom", [1.0, 1.7, 2.0, 4.0, 30.0])
@pytest.mark.parametrize("t", [0.0, 0.5, 3.0, -3.0, 12.0])
def test_p_is_that_of_students_t(t, freedom):
    assert two_sided_p(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 29, 99, 9999])
def test_the_quantile_is_that_of_students_t(freedom):
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12)
