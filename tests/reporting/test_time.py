"""Reports of runs with a simulated clock: synchronous and late clients in one table."""

import pytest
from run_folders import write_run

from gcfed.folders.folder import read_run
from gcfed.folders.measures import parse, value
from gcfed.reporting import write_report

TARGET = 0.6


def write_timed(folder, seconds, method, seed, **participation):
    """Ten rounds that reach 60 % in the seventh."""
    rows = [
        {
            "test/acc": 0.1 * t,
            "clock/seconds": seconds * t,
            "comm/down_bytes": 1,
            "comm/up_bytes": 1,
        }
        for t in range(10)
    ]
    return write_run(
        folder,
        rows,
        seed=seed,
        rounds=10,
        tags={"algorithm": method},
        methods={} if method == "FedAvg" else {"m": {"_target_": f"mine.{method}"}},
        participation=participation,
        summary={"rounds": 10, "result": "test/acc", "targets": [TARGET]},
        targets=[TARGET],
    )


def test_seconds_to_a_target_are_the_time_of_its_first_round(tmp_path):
    write_timed(tmp_path / "run", 2.5, "FedAvg", 1)
    run = read_run(tmp_path / "run")
    assert value(run, "rounds:0.6") == 7
    assert value(run, "seconds:0.6") == 15.0
    assert value(run, "seconds:0.95") is None
    assert value(run, "seconds:test/acc>=0.6") == 15.0
    assert parse("seconds:0.6").column == "test/acc"
    assert parse("seconds:0.95").bounded(run) == (22.5, True)
    with pytest.raises(ValueError, match=r"seconds:<target accuracy>"):
        value(run, "seconds:test/acc")


def test_synchronous_and_late_clients_stand_in_one_table(tmp_path):
    """How the server waits belongs to the method, so it makes no place of its own."""
    for seed in (1, 2, 3):
        write_timed(
            tmp_path / f"logs/a{seed}", 10.0, "FedAvg", seed, sampler={"_target_": "Uniform"}
        )
        late = {"_target_": "Buffered", "concurrency": 20}
        write_timed(tmp_path / f"logs/b{seed}", 3.0, "FedBuff", seed, sampler=late)
    write_report(tmp_path / "logs", out=tmp_path / "report")
    page = (tmp_path / "report/index.html").read_text()
    assert "seconds to 60" in page.replace("\u00a0", " ")
    assert "60.00" in page  # FedAvg's seventh round
    assert "18.00" in page  # FedBuff's
    assert (tmp_path / "report/figures/test_acc_seconds_1.png").is_file()
    assert not (tmp_path / "report/figures/test_acc_seconds_2.png").exists()
