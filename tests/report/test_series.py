"""Curves, means and targets against what NumPy gives by hand."""

import numpy as np
import pytest
from run_folders import rows_of, write_run

from gcfed.metrics.convergence import smooth
from gcfed.report.groups import grouped
from gcfed.report.series import (
    ACCURACY,
    ERROR,
    Curve,
    crossing,
    drawing,
    ended,
    mean_std,
    reached,
    score,
    target_of,
    thin,
    troubles,
    window_of,
)  # fmt: skip


def group_of(tmp_path, *curves, **options):
    """One group, a run a seed."""
    runs = [
        write_run(tmp_path / f"s{i}", **{"config": {"seed": i}, "rows": rows_of(curve)} | options)
        for i, curve in enumerate(curves, start=1)
    ]
    (group,) = grouped(runs)
    return group


def test_mean_and_deviation_over_the_seeds(tmp_path):
    curves = np.random.default_rng(0).random((3, 20))
    found = drawing(group_of(tmp_path, *curves), ACCURACY, window=4)
    smoothed = 100 * np.array([smooth(curve, 4) for curve in curves])
    np.testing.assert_array_equal(found.mean.x, np.arange(1, 21))
    np.testing.assert_allclose(found.mean.y, smoothed.mean(0))
    np.testing.assert_allclose(found.mean.high - found.mean.y, smoothed.std(0, ddof=1))
    np.testing.assert_allclose(found.mean.y - found.mean.low, smoothed.std(0, ddof=1))
    assert found.partial == ()
    assert found.raw is None


def test_seeds_meet_at_their_common_rounds(tmp_path):
    """One was tested every round, one every second: each is smoothed by itself before."""
    every, second = np.array([0.1, 0.2, 0.3, 0.4]), np.array([np.nan, 0.6, np.nan, 1.0])
    found = drawing(group_of(tmp_path, every, second), ACCURACY, window=2)
    assert found.mean.x.tolist() == [2, 4]
    np.testing.assert_allclose(found.mean.y, [100 * (0.15 + 0.6) / 2, 100 * (0.35 + 0.8) / 2])


def test_a_single_seed_has_no_deviation_but_its_values(tmp_path):
    values = np.linspace(0.1, 0.9, 30)
    group = group_of(tmp_path, values)
    found = drawing(group, ACCURACY, raw=True)
    assert found.window == 6
    assert found.mean.low is None
    np.testing.assert_allclose(found.raw.y, 100 * values)
    np.testing.assert_allclose(found.mean.y, 100 * smooth(values, 6))
    assert drawing(group, ACCURACY).raw is None


@pytest.mark.parametrize(("tests", "window"), [(0, 1), (7, 1), (10, 2), (49, 9), (50, 10), (800, 10)])
def test_few_tests_are_smoothed_less(tests, window):
    assert window_of(tests) == window


def test_what_did_not_finish_is_no_part_of_the_mean(tmp_path):
    """Seed 1 finishes, seed 2 stops after two rounds, seed 3 diverges in its third, with accuracies to the end."""
    config = {"rounds": 4}
    done = write_run(tmp_path / "1", config=config | {"seed": 1}, rows=rows_of([0.1, 0.2, 0.3, 0.4]))
    cut = write_run(tmp_path / "2", config=config | {"seed": 2}, rows=rows_of([0.5, 0.6]), summary=False)
    rows = rows_of([0.7, 0.8, 0.1, 0.1])
    rows[2]["test/loss"] = rows[3]["test/loss"] = float("inf")
    lost = write_run(tmp_path / "3", config=config | {"seed": 3}, rows=rows)
    (group,) = grouped([done, cut, lost])
    assert [run.state for run in group.runs] == ["finished", "unfinished", "diverged"]
    found = drawing(group, ACCURACY, window=1)
    np.testing.assert_allclose(found.mean.y, [10, 20, 30, 40])
    assert [curve.x.tolist() for curve in found.partial] == [[1, 2], [1, 2]]
    np.testing.assert_allclose(found.partial[1].y, [70, 80])
    assert troubles([group]) == "1 of 3 seeds diverged, 1 unfinished"


def test_a_run_without_finite_clients_got_as_far_as_the_last_round_with_some(tmp_path):
    rows = rows_of([0.1] * 4, **{"train/nonfinite_clients": [0, 2, 5, 5]})
    run = write_run(tmp_path / "a", config={}, rows=rows)
    assert run.state == "diverged"
    assert reached(run) == 2


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([(1, 2, True)], ""),
        ([(1, 2, False)], "unfinished"),
        ([(1, 2, True), (2, 9, False), (3, 9, False)], "2 of 3 seeds unfinished"),
    ],
)
def test_troubles_are_told(tmp_path, runs, told):
    made = [
        write_run(tmp_path / str(seed), config={"seed": seed, "rounds": 9}, rows=[{"round": last}], summary=done)
        for seed, last, done in ((s, 9 if d else r, d) for s, r, d in runs)
    ]
    assert troubles(grouped(made)) == told


def test_thinning_keeps_both_ends():
    keep = thin(1001, 400)
    assert (keep[0], keep[-1], len(keep)) == (0, 1000, 400)
    assert np.diff(keep).max() <= 3
    assert thin(5, 400).tolist() == [0, 1, 2, 3, 4]
    curve = Curve(np.arange(1001.0), np.arange(1001.0) ** 2, np.arange(1001.0)).thinned(11)
    assert curve.x.tolist() == [100.0 * i for i in range(11)]
    assert curve.y[-1] == 1e6
    assert curve.high is None


def test_the_target_is_one_that_half_of_the_curves_reach(tmp_path):
    """Of 50 and 90 %, only the first of two groups reaches 90."""
    strong = group_of(tmp_path / "a", [0.2, 0.6, 0.95])
    weak = group_of(tmp_path / "b", [0.2, 0.3, 0.4], config={"tags.algorithm": "fedprox"})
    weaker = group_of(tmp_path / "c", [0.2, 0.2, 0.3], config={"tags.algorithm": "fedlc"})
    draw = [drawing(g, ACCURACY, window=1) for g in (strong, weak, weaker)]
    assert target_of(draw[:2]) == (90.0, "90 %")
    assert target_of(draw[1:]) is None  # neither target, and no FedAvg
    assert crossing(draw[0].mean, 60.0) == 2
    assert crossing(draw[1].mean, 60.0) is None


def test_without_a_target_fedavg_is_to_be_reached(tmp_path):
    config = {"targets": [0.9]}
    base = group_of(tmp_path / "a", [0.2, 0.45, 0.4], config=config)
    other = group_of(tmp_path / "b", [0.2, 0.3, 0.5], config=config | {"tags.gc": "gcfed"})
    draw = [drawing(g, ACCURACY, window=1) for g in (base, other)]
    target, label = target_of(draw)
    assert target == pytest.approx(45)
    assert label == "FedAvg:\n45.0 %"
    assert target_of(draw[:1]) is None


def test_a_target_that_all_reach_at_once_says_nothing(tmp_path):
    draw = drawing(group_of(tmp_path, [0.6, 0.7, 0.8], config={"targets": [0.5]}), ACCURACY)
    assert target_of([draw]) is None


def test_what_a_group_came_to(tmp_path):
    """The mean over the last 10 rounds; unfinished runs are none."""
    curves = np.random.default_rng(1).random((2, 15))
    group = group_of(tmp_path / "a", *curves)
    values = ended(group, ACCURACY.measure, 100)
    np.testing.assert_allclose(values, 100 * curves[:, 5:].mean(1))
    assert mean_std(values) == (pytest.approx(values.mean()), pytest.approx(values.std(ddof=1)))
    assert mean_std(values[:1]) == (values[0], 0.0)
    assert score(group, ACCURACY) == pytest.approx(curves[:, 5:].mean())
    running = group_of(tmp_path / "b", curves[0], config={"rounds": 99}, summary=False)
    assert len(ended(running, ACCURACY.measure)) == 0


def test_an_error_is_better_the_smaller(tmp_path):
    rows = [{"test/loss": 1.0, "test/relative_error": error} for error in (0.5, 0.25)]
    (group,) = grouped([write_run(tmp_path / "a", config={}, rows=rows)])
    assert score(group, ERROR) == -0.25
    assert score(group, ACCURACY) == -np.inf
