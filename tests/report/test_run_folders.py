"""The helper of the tests writes what a run writes."""

import pytest
from run_folders import rows_of, write_run

from gcfed.report.runs import find_runs


def test_a_finished_run_reads_back(tmp_path):
    rows = rows_of([0.2, 0.6, float("nan")], **{"cka/fc1": [0.9, 0.8, 0.7]})
    run = write_run(tmp_path / "a", config={"seed": 3, "partition.alpha": 0.05, "gc": {"lam": 0.5}}, rows=rows)
    assert (run.state, run.seed, run.rounds, run.get("partition.alpha"), run.get("gc.lam")) == (
        "finished", 3, 3, 0.05, 0.5,
    )  # fmt: skip
    assert run.get("partition.min_size") == 1
    assert [values.tolist() for values in run.curve("test/acc")] == [[1, 2], [0.2, 0.6]]
    assert run.curve("cka/fc1")[1].tolist() == [0.9, 0.8, 0.7]
    assert run.summary["rounds_to_target"] == {"0.5": 2, "0.9": None}
    assert [found.folder for found in find_runs([tmp_path])] == [tmp_path / "a"]


@pytest.mark.parametrize(
    ("options", "state", "note"),
    [
        ({"summary": False, "config": {"rounds": 9}}, "unfinished", "after round 2 of 9"),
        (
            {"failure": "ValueError: no\nTraceback", "config": {"rounds": 9}},
            "failed",
            "after round 2 of 9: ValueError: no",
        ),
        ({"rows": [{"test/acc": 0.1, "test/loss": "inf"}], "config": {}}, "diverged", "not finite"),
    ],
)
def test_other_endings(tmp_path, options, state, note):
    run = write_run(tmp_path / "a", **{"rows": rows_of([0.2, 0.6]), **options})
    assert run.state == state
    assert note in run.note
