"""The page of late updates: its timetables are its runs', and its numbers follow from them."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from reproductions.results import figures, late_updates
from reproductions.results.late_updates import METHODS, SEEDS, SPREADS
from reproductions.stored import rate_of, seed_of, stored_runs

RUNS = stored_runs("late-updates")
FINAL = {name: run for name, run in RUNS.items() if seed_of(run) != late_updates.SEARCH_SEED}


def setting(run, key):
    (found,) = [word for word in run.overrides if word.startswith(f"{key}=")]
    return found.partition("=")[2]


def method_of(run):
    (found,) = [m for m in METHODS.values() if m.algorithm == setting(run, "algorithm")]
    return found


@pytest.mark.parametrize("name", FINAL)
def test_the_timetable_of_a_run_is_the_pages(name):
    run = FINAL[name]
    method = method_of(run)
    turns = method.turns(setting(run, "participation.clock.spread"), seed_of(run))
    assert len(turns) == len(run.metrics) == late_updates.UPLOADS // method.per_round
    seconds = [turn.seconds for turn in turns]
    assert [*run.metrics["clock/seconds"]] == pytest.approx(seconds, rel=1e-5)
    assert [*run.metrics["train/clients"]] == [len(turn.clients) for turn in turns]
    if method.late:
        late = [np.mean(t - turn.versions) for t, turn in enumerate(turns)]
        assert [*run.metrics["late/mean"]] == pytest.approx(late, rel=1e-5)


def test_accuracies_at_a_point_are_the_last_three_tests_up_to_it():
    fedavg = METHODS["FedAvg"]
    run = fedavg.run(RUNS, "none", SPREADS[0], 1)
    tests = 100 * run.metrics["test/acc"]
    assert fedavg.accuracy(run, 200) == pytest.approx(tests[[16, 18, 20]].mean())
    assert fedavg.accuracy(run, 79) == pytest.approx(tests[[2, 4, 6]].mean())
    assert fedavg.accuracy(run, 0) == 10
    assert fedavg.accuracy(run, 40) == pytest.approx(tests[[2, 4]].mean())


def test_equal_time_is_the_end_of_fedbuffs_run():
    for spread in SPREADS:
        for seed in SEEDS:
            end = METHODS["FedBuff"].turns(spread, seed)[-1].seconds
            for method in METHODS.values():
                uploads = late_updates.equal_time(method, spread, seed)
                steps = uploads // method.per_round
                turns = method.turns(spread, seed)
                assert steps == 0 or turns[steps - 1].seconds <= end
                assert steps == len(turns) or turns[steps].seconds > end


def test_p_and_holms_correction_are_those_of_scipy():
    values = np.array([1.0, 2.5, 0.7])
    assert late_updates.p_of(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-4)
    ps = {"a": 0.04, "b": 0.01, "c": 0.03}
    assert late_updates.holm(ps, 3) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    # a fourth comparison has no runs
    assert late_updates.holm(ps, 4) == pytest.approx({"b": 0.04, "c": 0.09, "a": 0.09})


def last_three(algorithm, gc, spread, seed):
    """The mean of a run's last three tests in percent, without the page's functions."""
    words = {f"algorithm={algorithm}", f"gc={gc}", f"seed={seed}"}
    words.add(f"participation.clock.spread={spread}")
    (run,) = [run for run in FINAL.values() if words <= {*run.overrides}]
    return 100 * run.metrics["test/acc"].dropna().tail(3).mean()


def gains_of(algorithms, spread):
    """The mean gain over algorithms at the end of the runs, by seed."""
    gains = []
    for seed in (1, 2, 3):
        centralized = [last_three(name, "gcfed", spread, seed) for name in algorithms]
        plain = [last_three(name, "none", spread, seed) for name in algorithms]
        gains.append(np.mean(centralized) - np.mean(plain))
    return np.array(gains)


def test_all_planned_runs_are_stored():
    """Two synchronous methods at one σ and three late ones at two, with two GCs and three seeds."""
    assert len(FINAL) == 6 * 2 + 6 * 3 * 2


def test_the_comparisons_average_over_both_spreads_and_by_the_rule_over_one():
    late = ("fedbuff", "fedasync", "ca2fl")
    small = gains_of(late, "0.7")
    large = gains_of(late, "1.4")
    synchronous = gains_of(("fedavg", "scaffold"), "0.7")
    both = (small + large) / 2
    found = late_updates.differences(RUNS)
    assert [*found] == ["A", "B", "C", "D", "E", "F"]
    assert found["A"] == pytest.approx(both)
    assert found["B"] == pytest.approx(synchronous)
    assert found["C"] == pytest.approx(both - synchronous)
    assert found["D"] == pytest.approx(large - small)
    differences = [gains_of(["fedasync"], s) - gains_of(["fedbuff"], s) for s in SPREADS]
    assert found["E"] == pytest.approx(np.mean(differences, axis=0))
    in_time = late_updates.differences(RUNS, late_updates.IN_TIME)
    assert [*in_time] == ["A", "B", "C", "E", "F"]
    assert in_time["A"] == pytest.approx(small)
    assert in_time["C"] == pytest.approx(small - synchronous)


def test_a_prediction_of_no_difference_holds_up_to_two_points():
    assert late_updates.near_zero(np.array([1.0, 2.0, 3.0])) == "holds (mean +2.00)"
    assert late_updates.near_zero(np.array([-1.0, -2.0, -3.1])) == "fails (mean −2.03)"


def test_the_page_and_the_index_count_the_predictions_that_hold():
    cells = [*late_updates.predictions(RUNS).values()]
    counts = [sum(row[column].startswith("holds") for row in cells) for column in (1, 2)]
    text = (figures.HERE / "late-updates.md").read_text()
    names = ("none", "one", "two", "three", "four", "five", "six")
    complete, in_time = (names[count] for count in counts)
    assert f"With all runs {complete} of six predictions hold" in text
    assert f"by the plan's rule {in_time}" in text
    index = (figures.HERE / "README.md").read_text()
    assert f"{complete} of six predictions hold" in index
    assert f"without them {in_time} prediction holds" in index


@pytest.mark.parametrize("spread", SPREADS)
def test_quarters_by_speed_have_all_uploads_and_slow_clients_are_later(spread):
    for name in ("FedBuff", "FedAsync"):
        of_uploads, steps_late = late_updates.by_quarter(METHODS[name], spread)
        assert of_uploads.sum() == pytest.approx(100)
        assert of_uploads[0] > of_uploads[3]
        assert [*steps_late] == sorted(steps_late)


def test_a_synchronous_cohort_does_not_depend_on_the_devices():
    cohorts = [[t.clients.tolist() for t in METHODS["FedAvg"].turns(s, 1)] for s in SPREADS]
    assert cohorts[0] == cohorts[1]


def test_the_rate_of_each_run_is_the_best_of_its_search():
    for (name, label), cells in late_updates.search(RUNS).items():
        trials = zip(late_updates.RATES, cells, strict=True)
        valid = {rate: float(text) for rate, text in trials if "refused" not in text}
        gc = "none" if label == "no GC" else "gcfed"
        runs = [run for run in FINAL.values() if method_of(run) is METHODS[name]]
        rates = {rate_of(run) for run in runs if setting(run, "gc") == gc}
        assert rates == {max(valid, key=valid.__getitem__)}


def test_the_answer_states_the_smallest_and_the_largest_gain_without_divergence():
    values = []
    for name in late_updates.LATE:
        for spread in SPREADS:
            own = late_updates.gains(RUNS, name, spread, late_updates.equal_uploads)
            for seed, gain in zip(SEEDS, own, strict=True):
                run = METHODS[name].run(RUNS, "gcfed", spread, seed)
                if run.metrics["train/nonfinite_clients"].sum() == 0:
                    values.append(gain)
    assert len(values) == 14
    text = (figures.HERE / "late-updates.md").read_text()
    assert f"it gains {min(values):.1f} to {max(values):.1f} points" in text


def test_the_curves_are_those_of_the_stored_data():
    figure = Figure()
    figures.late_curves(figure)
    above = figure.axes[0]
    (line,) = [line for line in above.lines if line.get_label() == "FedAvg + GC-Fed"]
    runs = [METHODS["FedAvg"].run(RUNS, "gcfed", "0.7", seed) for seed in SEEDS]
    ends = [100 * run.metrics["test/acc"].loc[20] for run in runs]
    assert line.get_xdata()[-1] == late_updates.UPLOADS
    assert line.get_ydata()[-1] == pytest.approx(np.mean(ends))
    in_time = figure.axes[1].lines[[*above.lines].index(line)]
    seconds = [METHODS["FedAvg"].turns("0.7", seed)[-1].seconds for seed in SEEDS]
    assert in_time.get_xdata()[-1] == pytest.approx(np.mean(seconds))
