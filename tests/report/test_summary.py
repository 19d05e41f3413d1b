"""What a run cost until it reached a target, counted by hand from its rows."""

import json
from types import SimpleNamespace

import pytest

from gcfed.report.summary import summary_of, write_summary


def row(number, acc=None, *, seconds=2.0, clients=4):
    """A round of which every client sends 10 bytes and receives 30."""
    tested = {} if acc is None else {"test/acc": acc}
    return tested | {
        "round": number, "train/clients": clients, "train/nonfinite_clients": 0, "comm/down_bytes": 30 * clients,
        "comm/up_bytes": 10 * clients, "time/train_s": seconds, "time/round_s": seconds + 1,
    }  # fmt: skip


ROWS = [row(1), row(2, 0.4, seconds=8.0), row(3), row(4, 0.6, seconds=3.0, clients=2), row(5), row(6, 0.5)]


def test_what_a_target_cost():
    """Tested every second round: what the rounds before the test cost belongs to it."""
    summary = summary_of(ROWS, [0.3, 0.5, 0.9])
    assert summary["rounds_to_target"] == {"0.3": 2, "0.5": 4, "0.9": None}
    assert summary["bytes_to_target"] == {"0.3": 320, "0.5": 560, "0.9": None}
    assert summary["client_seconds_to_target"] == {"0.3": 10.0, "0.5": 15.0, "0.9": None}
    assert summary["client_seconds"] == 0.5  # the median of 2/4, 8/4, 2/4, 3/2, 2/4 and 2/4
    assert summary["comm/down_bytes"] + summary["comm/up_bytes"] == 40 * 22


def test_two_processes_spend_twice_the_seconds():
    one, two = (summary_of(ROWS, [0.5], processes) for processes in (1, 2))
    assert two["client_seconds"] == 2 * one["client_seconds"]
    assert two["client_seconds_to_target"] == {"0.5": 30.0}
    assert two["bytes_to_target"] == one["bytes_to_target"]


@pytest.mark.parametrize(("targets", "reached"), [([0.5, 0.9], True), ([0.9], False), ([], False)])
def test_the_table_and_the_file_name_the_costs(tmp_path, capsys, targets, reached):
    lines = [",".join(ROWS[1])] + [",".join(str(r.get(k, "")) for k in ROWS[1]) for r in ROWS]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    result = write_summary(tmp_path, SimpleNamespace(), targets=targets, figures=False)
    table = capsys.readouterr().out
    assert "seconds a client's round" in table
    for line in ("bytes to target", "clients' seconds to target"):
        assert (line in table) == reached
    if reached:
        assert "50%: 560 B" in table
        assert "50%: 15" in table
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["bytes_to_target"] == result["bytes_to_target"]


@pytest.mark.parametrize(("losses", "last", "best"), [([2.0, "inf"], None, 2.0), (["nan", 3.0, 4.0], 4.0, 3.0)])
def test_a_run_that_diverged_is_summed_up(tmp_path, losses, last, best):
    rows = [row(i, 0.1) | {"test/loss": loss} for i, loss in enumerate(losses, start=1)]
    lines = [",".join(rows[0])] + [",".join(map(str, r.values())) for r in rows]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    write_summary(tmp_path, SimpleNamespace(), targets=[0.5], figures=False)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["test/loss"], written["test/loss_best"]) == (last, best)
