"""Measures of a run equal their definitions and results computed by hand."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from conftest import refuses
from run_folders import ROW, accuracies, run_of, write_run

from gcfed.folders.columns import SUMMARY_STATISTICS, is_accuracy, known_better
from gcfed.folders.measures import parse, smooth, value
from gcfed.folders.summary import summary_of


def test_a_moving_mean_equals_its_definition():
    # 70 stands alone
    values = np.random.default_rng(0).random(25)
    rounds = np.array([1, 2, *range(4, 48, 2), 70])
    curve = pd.Series(values, index=rounds)
    wanted = [values[(rounds > t - 10) & (rounds <= t)].mean() for t in rounds]
    np.testing.assert_allclose(smooth(curve), wanted, rtol=1e-13)


@pytest.fixture
def run(tmp_path):
    rows = accuracies(
        0.1, None, 0.5, None, 0.25, 0.75, **{"test/perplexity": [6, 2, 3, 4, 5, "inf"]}
    )
    return write_run(tmp_path / "a", rows)


@pytest.mark.parametrize("window", [1, 3])
def test_a_moving_mean_is_infinite_while_it_has_an_infinite_test(window):
    losses = pd.Series([1.0, 2.0, np.inf, 3.0, 5.0, 4.0], index=[1, 2, 3, 5, 6, 8])
    every = losses.reindex(range(1, 9))
    wanted = [
        every.loc[max(1, t - window + 1) : t].dropna().to_numpy().mean() for t in losses.index
    ]
    np.testing.assert_allclose(smooth(losses, window), wanted)


@pytest.mark.parametrize(
    ("measure", "wanted"),
    [
        ("final:test/acc", 0.75),
        ("test/acc", 0.75),
        ("best:test/acc", 0.75),
        ("best:test/loss", 1.0),
        ("last10:test/acc", 0.4),
        ("total:comm/up_bytes", 30000),
        ("rounds:0.5", 3),
        ("rounds:0.76", None),
        ("final:test/perplexity", None),
        ("best:test/perplexity", 2),
        ("best:cka/fc1", None),
        ("nothing", None),
        ("last:test/acc", 0.75),
        ("max:test/acc", 0.75),
        ("min:test/acc", 0.1),
        ("mean:test/acc", 0.4),
        ("median:test/acc", 0.375),
        ("mean:test/acc[2]", 0.5),
        ("max:test/acc[4]", 0.75),
        ("max:test/acc[1]", 0.75),
        ("test/acc@4", 0.5),
        ("test/acc@5", 0.25),
        ("test/acc@9", None),
        ("mean:test/acc[3]@5", 0.375),
        ("last10:test/acc@5", 0.85 / 3),
        ("rounds:test/acc>=0.45", 3),
        ("rounds:test/acc>=0.9", None),
        ("rounds:test/rmse<=0.9", None),
        ("rounds:test/acc[3]>=0.4", 6),
        ("rounds:test/acc[3]>=0.6", None),
        ("best_round", 6),
        ("client_seconds", 0.2),
        ("acc_diff/min", -0.25),
    ],
)
def test_measure(run, measure, wanted):
    """Rounds 1, 3, 5 and 6 have tests: 0.1, 0.5, 0.25 and 0.75."""
    assert value(run, measure) == (wanted if wanted is None else pytest.approx(wanted, abs=1e-12))


@pytest.mark.parametrize(
    ("measure", "wanted"),
    [
        ("rounds:0.5", (3, False)),
        ("rounds:0.8", (6, True)),  # all its rounds
        ("rounds:test/rmse<=0.8", (None, False)),  # not measured
        ("last:test/rmse", (None, False)),
    ],
)
def test_a_run_that_missed_its_target_counts_with_its_length(run, measure, wanted):
    assert parse(measure).bounded(run) == wanted


def test_less_of_a_loss_reaches_its_target(tmp_path):
    losses = [{"test/loss": loss} for loss in (2.0, math.inf, 0.75, 0.5)]
    run = write_run(tmp_path, losses)
    assert value(run, "rounds:test/loss<=0.8") == 3
    assert value(run, "rounds:test/loss<=0.75") == 3
    assert value(run, "rounds:test/loss<=0.4") is None
    assert not parse("rounds:test/loss<=0.8").higher_is_better


@pytest.mark.parametrize(
    ("accuracy", "reached"),
    [(0.7, True), (float(np.float32(0.7)), True), (0.1 + 0.6, True), (0.699999, False)],
)
def test_a_target_is_reached_up_to_rounding(tmp_path, accuracy, reached):
    run = write_run(tmp_path, accuracies(0.2, accuracy))
    assert value(run, "rounds:0.7") == (2 if reached else None)
    errors = [{"test/loss": 2.0}, {"test/loss": 1.4 - accuracy}]
    run = write_run(tmp_path / "errors", errors)
    assert value(run, "rounds:test/loss<=0.7") == (2 if reached else None)


@pytest.mark.parametrize("measure", ["rounds:test/loss>=0.5", "seconds:test/acc<=0.5"])
def test_a_target_is_not_reached_from_the_worse_side(measure):
    with refuses(r"is reached from the other side\. Write [<>]= in it\."):
        parse(measure)


def test_a_test_that_is_not_finite_reaches_no_target(tmp_path):
    run = write_run(tmp_path, accuracies(0.1, math.inf, 0.2))
    assert value(run, "rounds:test/acc>=0.5") is None


@pytest.mark.parametrize(
    ("measure", "is_higher"),
    [
        ("last:test/acc", True),
        ("mean:personal/acc[10]", True),
        ("rounds:test/acc>=0.8", False),
        ("seconds:0.8", False),
        ("last:val/perplexity", False),
        ("min:test/mae", False),
        ("client_seconds", False),
        ("acc_diff/std", False),
        ("best_round", True),  # neither is better
    ],
)
def test_the_better_run_of_each_measure(measure, is_higher):
    """A search minimises, and the best row is the smallest, where less is better."""
    assert parse(measure).higher_is_better is is_higher


def test_a_name_alone_is_one_number_or_refused(run):
    """``summary.json`` has some numbers under names of columns: the last values, and four of all
    rounds.
    """
    finite = {name: x for name, x in run.summary.items() if isinstance(x, int | float)}
    columns = [name for name in finite if name in run.metrics]
    assert {*SUMMARY_STATISTICS} < {*columns}
    for name in columns:
        if name in SUMMARY_STATISTICS:
            with pytest.raises(ValueError, match=rf"Take final:{name} or \w+:{name}\."):
                parse(name)
            assert value(run, f"{SUMMARY_STATISTICS[name]}:{name}") == finite[name]
        else:
            assert value(run, name) == pytest.approx(finite[name], abs=1e-12)
    for name in finite.keys() - {*columns}:
        assert known_better(name)
        is_column_elsewhere = name in ("test/acc_ema", "test/acc_smooth10")
        assert value(run, name) == (None if is_column_elsewhere else finite[name])


@pytest.mark.parametrize(
    ("measure", "title"),
    [
        ("final:test/acc", "test accuracy"),
        ("test/acc", "test accuracy"),
        ("best:test/acc", "test accuracy, best"),
        ("best:test/loss", "test loss, best"),
        ("min:test/acc", "test accuracy, lowest"),
        ("last10:test/acc", "test accuracy, last 10 rounds"),
        ("max:test/acc[5]", "test accuracy, best, last 5 rounds"),
        ("mean:val/f1", "val/f1, mean"),
        ("total:comm/up_bytes", "sent by clients"),
        ("total:comm/up_bytes[3]", "sent by clients, total, last 3 rounds"),
        ("last10:test/acc@50", "test accuracy, last 10 rounds at round 50"),
        ("test/acc_ema@500", "test/acc_ema at round 500"),
        ("mean:test/acc[10]@500", "test accuracy, last 10 rounds at round 500"),
        ("rounds:0.8", "rounds to 80\u00a0%"),
        ("seconds:0.8", "seconds to 80\u00a0%"),
        ("rounds:test/acc[10]>=0.6", "rounds to 60\u00a0% in means of 10 rounds"),
        ("rounds:test/acc_ema>=0.3", "rounds to test/acc_ema 0.3"),
        ("best_round", "best_round"),
    ],
)
def test_the_title_of_each_measure(measure, title):
    assert parse(measure).title == title


def test_the_last_ten_rounds_count_rounds_and_not_tests():
    run = run_of(values=(0.9, *[math.nan] * 9, 0.2, math.nan, 0.4))  # rounds 4 to 13
    assert value(run, "last10:test/acc") == pytest.approx(0.3)


@pytest.mark.parametrize("rounds", [1, 9, 10, 11, 25])
def test_the_last_ten_rounds_are_at_most_ten(rounds):
    values = np.random.default_rng(rounds).random(rounds)
    run = run_of(values=values, rounds=rounds)
    assert value(run, "last10:test/acc") == pytest.approx(values[-10:].mean(), abs=1e-15)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("test/acc", True),
        ("test/acc_smooth10", True),
        ("val/acc", True),
        ("clients/acc_before", True),
        ("classes/worst_acc", True),
        ("personal/local_acc", True),
        ("personal/global_worst10", True),
        ("personal/local_std", True),
        ("test/loss", False),
        ("drift/cosine", False),
        ("leakage/accuracy", False),
        ("account/x", False),
    ],
)
def test_accuracies_are_known_by_their_names(column, expected):
    assert is_accuracy(column) == expected


@pytest.mark.parametrize(
    "measure", ["most:test/acc", "rounds:80 %", "final:", "", "test/acc[10]", "last10:test/acc[5]"]
)
def test_an_invalid_measure_is_named(measure):
    with pytest.raises(
        ValueError, match=rf"measure={re.escape(repr(measure))} is not understood.*last10:<column>"
    ):
        value(run_of(), measure)


def test_a_single_value_has_no_window():
    for measure in ("final:test/acc[10]", "last:test/acc[10]"):
        with refuses(r"one value\. Write mean:test/acc\[10\] for the mean over these rounds"):
            parse(measure)


@pytest.mark.parametrize(
    "measure", ["mean:test/acc[0]", "rounds:test/acc[0]>=0.5", "test/acc@0", "last10:test/acc@0"]
)
def test_rounds_of_a_measure_count_from_1(measure):
    with refuses(f"^measure={re.escape(repr(measure))}: rounds count from 1"):
        parse(measure)


def test_a_diverged_run_has_no_final_value(tmp_path):
    run = write_run(
        tmp_path / "a", accuracies(0.1, 0.5, 0.2, 0.1, **{"test/loss": [2.0, 1.0, "inf", "nan"]})
    )
    assert run.state == "diverged"
    assert value(run, "final:test/loss") is value(run, "last10:test/loss") is None
    assert value(run, "best:test/loss") == 1
    assert value(run, "final:test/acc") == 0.1


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("column", "values", "best"),
    [("test/score", (0.8, 0.9), 0.9), ("test/loss", (0.5, 0.4), 0.4)],
)
def test_a_diverged_test_is_never_the_best(tmp_path, column, values, best, bad):
    first, last = values
    run = write_run(tmp_path / "a", accuracies(0.1, 0.5, 0.2, **{column: [first, bad, last]}))
    assert value(run, f"best:{column}") == best
    assert value(run, f"max:{column}") == max(values)
    assert value(run, f"min:{column}") == min(values)
    assert value(run, f"last10:{column}") is None
    only = write_run(tmp_path / "b", accuracies(0.1, **{column: [bad]}))
    assert value(only, f"best:{column}") is None


#: In these rounds, each client sends 10 bytes and receives 30.
ROWS = [
    ROW
    | {
        "test/acc": acc,
        "time/train_s": seconds,
        "train/clients": clients,
        "comm/down_bytes": 30 * clients,
        "comm/up_bytes": 10 * clients,
    }
    for acc, seconds, clients in (
        (None, 2.0, 4),
        (0.4, 8.0, 4),
        (None, 2.0, 4),
        (0.6, 3.0, 2),
        (None, 2.0, 4),
        (0.5, 2.0, 4),
    )
]


@pytest.fixture
def table():
    return pd.DataFrame(ROWS, index=pd.RangeIndex(1, 7, name="round")).astype(float)


def test_the_cost_of_a_target(table):
    """Every second round has a test. The cost includes all rounds up to the test."""
    one = summary_of(table, [0.3, 0.5, 0.9])
    two = summary_of(table, [0.5], processes={1: 2})
    assert one["rounds_to_target"] == {"0.3": 2, "0.5": 4, "0.9": None}
    assert one["bytes_to_target"] == {"0.3": 320, "0.5": 560, "0.9": None}
    assert one["client_seconds"] == 0.5  # the median of 2/4, 8/4, 2/4, 3/2, 2/4 and 2/4
    assert one["comm/down_bytes"] + one["comm/up_bytes"] == 40 * 22
    assert two["client_seconds"] == 1.0


@pytest.mark.parametrize(
    ("processes", "seconds"),
    [
        ({1: 1, 3: 2}, 1.0),  # of 2/4, 8/4, 4/4, 6/2, 4/4 and 4/4
        ({1: 2, 7: 1}, 1.0),  # a finished run that is asked to continue
        ({5: 3}, 1.5),  # the earlier rounds are not known
        ({}, math.nan),
    ],
)
def test_each_round_counts_its_own_processes(table, processes, seconds):
    found = summary_of(table, [], processes)["client_seconds"]
    assert found == pytest.approx(seconds, nan_ok=True)


def test_rounds_without_clients_have_no_time_per_client(table):
    table.loc[[1, 2, 3], "train/clients"] = 0
    assert summary_of(table, [])["client_seconds"] == 0.5  # the median of 3/2, 2/4 and 2/4


def test_the_summary_of_a_curve(table):
    found = summary_of(table, [0.41, 0.425, 0.45])
    assert found["test/acc"] == 0.5
    assert found["test/acc_best"] == 0.6
    assert found["best_round"] == 4
    assert found["test/acc_smooth10"] == pytest.approx(0.5)
    assert found["test/acc_ema"] == pytest.approx(0.9 * (0.9 * 0.4 + 0.1 * 0.6) + 0.1 * 0.5)
    # also for the mean of ten rounds
    assert found["rounds_to_target"] == {"0.41": 4, "0.425": 4, "0.45": 4}
    changes = [found[f"acc_diff/{name}"] for name in ("mean", "std", "min")]
    assert changes == pytest.approx([0.05, 0.15, -0.1])
