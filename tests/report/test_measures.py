"""What tables report of a run."""

import math

import pytest
from run_folders import rows_of, write_run

from gcfed.report.measures import value

NAN = math.nan


@pytest.fixture
def run(tmp_path):
    acc = [0.1, NAN, 0.5, NAN, 0.25, 0.75]
    return write_run(tmp_path / "a", config={}, rows=rows_of(acc, **{"gap/l2": [1, 2, 3, 4, 5, math.inf]}))


@pytest.mark.parametrize(
    ("measure", "wanted"),
    [
        ("test/acc_best", 0.75),
        ("acc_diff/min", -0.25),
        ("rounds_to_target/0.5", 3),
        ("rounds_to_target/0.9", None),
        ("rounds_to_target/0.81", None),
        ("mean:test/acc[2]", 0.5),
        ("mean:test/acc[1]", 0.75),
        ("mean:test/acc[3]", 0.5),
        ("mean:test/acc[4]", 0.5),
        ("max:test/acc[3]", 0.75),
        ("mean:test/acc", 0.4),
        ("min:test/acc", 0.1),
        ("last:test/acc", 0.75),
        ("sum:comm/up_bytes", 30000),
        ("last:gap/l2", None),
        ("max:gap/l2[2]", None),
        ("min:gap/l2", 1),
        ("last:cka/fc1", None),
        ("nothing", None),
        ("test/acc@3", 0.5),
        ("test/acc@4", 0.5),
        ("test/acc@6", 0.75),
        ("test/acc@7", None),
        ("gap/l2@6", None),
        ("rounds:test/acc>=0.5", 3),
        ("rounds:test/acc>=0.51", 6),
        ("rounds:test/acc>=0.76", None),
        ("rounds:test/acc>=5e-1", 3),
        ("rounds:test/loss<=1.5", 3),
        ("rounds:test/loss<=0.9", None),
        ("rounds:gap/l2>=6", None),
    ],
)
def test_measure(run, measure, wanted):
    assert value(run, measure) == (wanted if wanted is None else pytest.approx(wanted, abs=1e-12))


@pytest.mark.parametrize("measure", ["median:test/acc", "mean:test/acc[x]", "rounds:test/acc>0.5", "test/acc@end"])
def test_what_is_no_measure_is_named(run, measure):
    with pytest.raises(ValueError, match="is not understood") as error:
        value(run, measure)
    assert measure in str(error.value)
    assert "rounds:test/loss<=0.5" in str(error.value)


@pytest.mark.parametrize("target", ["0.8.1", "", "80 %"])
def test_a_target_that_is_no_number_is_named(run, target):
    with pytest.raises(ValueError, match=f"measure='rounds:test/acc>={target}': the target '{target}' is no number"):
        value(run, f"rounds:test/acc>={target}")


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("regression", [False, True])
def test_nothing_is_read_from_before_a_run_diverged(tmp_path, broken, regression):
    """From round 3 on the loss is not finite: in a file NaN is an empty cell, so the last number is round 2's."""
    loss = [2.0, 1.0, broken, broken]
    rows = rows_of([0.1, 0.5, 0.2, 0.1], **{"test/loss": loss, "test/relative_error": loss, "gap/l2": [1, 2, 3, NAN]})
    rows = [{k: v for k, v in row.items() if k != "test/acc"} for row in rows] if regression else rows
    run = write_run(tmp_path / "a", config={}, rows=rows, summary={"test/loss": broken})
    assert run.state == "diverged"
    nothing = [f"{how}:{name}" for how in ("last", "mean", "max") for name in ("test/loss", "test/relative_error")]
    for measure in (*nothing, "mean:test/loss[2]", "test/loss@3", "test/loss@4", "last:gap/l2", "test/loss"):
        assert value(run, measure) is None, measure
    assert value(run, "test/loss@2") == value(run, "min:test/loss") == 1
    assert value(run, "rounds:test/loss<=1") == 2
    if not regression:
        assert (value(run, "last:test/acc"), value(run, "mean:test/acc[2]")) == (0.1, pytest.approx(0.15))


def test_a_run_without_rounds_has_none(tmp_path):
    run = write_run(tmp_path / "b", config={"rounds": 3}, rows=[])
    measures = ("mean:test/acc[2]", "test/acc@1", "rounds:test/acc>=0.1", "test/acc_best")
    assert {value(run, measure) for measure in measures} == {None}
