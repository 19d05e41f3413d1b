"""Run folders can be read in any state. A damaged one does not stop the others."""

import math
import os
import re
from time import perf_counter

import numpy as np
import pytest
from run_folders import accuracies, write_run

from gcfed.folders.folder import find_runs
from gcfed.folders.reading import read_metrics
from gcfed.loggers.folder import RoundCSVLogger


def test_an_empty_cell_is_missing_and_nan_is_not_finite(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"round,a,b,c\r\n1,,,\r\n2,0.1,,1e-3\r\n3,,inf,\r\n4,nan,-inf,5\r\n")
    table = read_metrics(path)
    nan = math.nan
    inf = math.inf
    assert list(table.index) == [1, 2, 3, 4]
    for name, wanted in {
        "a": [nan, 0.1, nan, inf],
        "b": [nan, nan, inf, -inf],
        "c": [nan, 1e-3, nan, 5],
    }.items():
        np.testing.assert_array_equal(table[name], wanted)

    # a kill cut the last line short
    for text, rounds in (("", []), ("round,a", []), ("round,a\n1,2\n2,3", [1])):
        path.write_text(text)
        assert list(read_metrics(path).index) == rounds


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.csv"
    first = RoundCSVLogger(str(path))
    for row in (
        {"round": 1, "a": 0.1},
        {"round": 2, "a": 1e-30, "b": math.nan},
        {"round": 3, "a": 7.0, "b": 1},
    ):
        first.log_metrics(row)
    second = RoundCSVLogger(str(path), resume_round=2)
    second.log_metrics({"round": 3, "a": 8.0, "c": 2})
    assert path.read_text().splitlines() == ["round,a,b,c", "1,0.1,,", "2,1e-30,nan,", "3,8.0,,2"]
    RoundCSVLogger(str(path)).log_metrics({"round": 1, "a": 5})
    assert path.read_text().splitlines() == ["round,a", "1,5"]


# Nine of nine of nine … values.
_NINE = [",".join(f"*a{level}" for _ in range(9)) for level in range(11)]
ALIASES = "a0: &a0 [1]\n" + "".join(
    f"a{level}: &a{level} [{nine}]\n" for level, nine in enumerate(_NINE, start=1)
)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("config.yaml", "a: [", "config.yaml"),
        ("config.yaml", "seed: 1", r"rounds=null must be a whole number\."),
        ("config.yaml", "rounds: 1\ntargets: 0.5 and 0.7", "targets=0.5 and 0.7 must be a list"),
        ("config.yaml", "rounds: 1\nseed: [1]", r"seed=\[1\] must be a whole number"),
        ("config.yaml", "rounds: 1\na: 0x" + "f" * 9999, "Exceeds the limit"),
        ("config.yaml", "rounds: 1\na: " + "x" * 30_000, "a text of 30,000 characters"),
        ("config.yaml", "rounds: 1\na: " + "[" * 100_000, "more than 100 levels"),
        ("config.yaml", "rounds: 1\na:\n  " + "- " * 5_000 + "1", "more than 100 levels"),
        ("config.yaml", "rounds: 1\na: &a [*a]", "the alias .a"),
        ("config.yaml", "rounds: 1\n" + ALIASES, "the alias .a0"),
        ("config.yaml", "rounds: 1\nb: [" + "1," * 200_001 + "]", "more than 200,000 values"),
        ("config.yaml", "# " + "x" * 6_000_000, "larger than 5 MB"),
        ("summary.json", '{"rounds": "1"}', "rounds in summary.json=1 must be a "),
        ("summary.json", '{"ended": 1}', "ended in summary.json=1 must be a "),
        ("summary.json", "[" * 100_000, "RecursionError"),
        ("metrics.csv", "round,test/acc\n1,0.5\n1,0.6\n", "not ascending whole numbers"),
        ("metrics.csv", "round,test/acc\n1000000000000,0.5\n", "not ascending whole numbers"),
        ("summary.json", "{", "JSONDecodeError: "),
        ("metrics.csv", "a,b\n1,2\n", "round"),
    ],
    ids=lambda text: text[:20],
)
def test_files_that_cannot_be_read_make_a_failed_run(tmp_path, name, text, reason):
    """None of them takes long, ends the process or stops the reader."""
    write_run(tmp_path / "a", accuracies(0.5))
    (tmp_path / "a" / name).write_text(text)
    started = perf_counter()
    (run,) = find_runs([tmp_path])
    assert perf_counter() - started < 20  # on a busy machine; else below a second
    assert run.state == "failed"
    assert run.rounds == 0
    assert len(run.curve("test/acc")) == 0
    assert re.fullmatch(f"its files cannot be read: .*{reason}.*", run.reason)


def test_a_pipe_in_place_of_a_file_does_not_stop_the_reader(tmp_path):
    write_run(tmp_path / "a", accuracies(0.5))
    (tmp_path / "a" / "config.yaml").unlink()
    os.mkfifo(tmp_path / "a" / "config.yaml")
    (run,) = find_runs([tmp_path])
    assert run.reason.endswith("config.yaml is no regular file")


LOSSES = [{"test/loss": 1.0}] * 2


@pytest.mark.parametrize(
    ("rows", "more", "state", "reason"),
    [
        (LOSSES, {}, "finished", ""),
        (LOSSES, {"rounds": 5}, "unfinished", "after round 2 of 5"),
        (
            [],
            {"rounds": 5, "failure": ""},
            "failed",
            "after round 0 of 5: an error without a message",
        ),
        (
            LOSSES,
            {"rounds": 5, "failure": "ValueError: x\ntrace"},
            "failed",
            "after round 2 of 5: ValueError: x",
        ),
        (
            LOSSES,
            {"rounds": 5, "failure": "Stopped by SIGINT in round 3 of 5: repeat it.\ntrace"},
            "interrupted",
            "after round 2 of 5: Stopped by SIGINT in round 3 of 5: repeat it.",
        ),
        (
            LOSSES,
            {"rounds": 5, "failure": "ValueError: Stopped by SIGINT\ntrace"},
            "failed",
            "after round 2 of 5: ValueError: Stopped by SIGINT",
        ),
        (
            [{"test/loss": 1.0}, {"test/loss": "nan"}, {}],
            {},
            "diverged",
            "the test loss of round 2 is not finite",
        ),
        (
            [{}, {"train/nonfinite_clients": 5}],
            {},
            "diverged",
            "no client of round 2 sent finite numbers",
        ),
        ([{"train/nonfinite_clients": 5}, {"train/nonfinite_clients": 4}], {}, "finished", ""),
    ],
)
def test_how_a_run_ended(tmp_path, rows, more, state, reason):
    run = write_run(tmp_path / "a", rows, **more)
    assert run.state == state
    assert run.reason == reason
    assert run.rounds == len(rows)


def test_runs_are_found_once(tmp_path):
    for name in ("b/x", "a", "a/inside"):
        write_run(tmp_path / "logs" / name, accuracies(0.5))
    (tmp_path / "logs" / "no_run").mkdir()
    (tmp_path / "logs" / "no_run" / "config.yaml").write_text("a: 1")
    (tmp_path / "latest").symlink_to(tmp_path / "logs" / "a")
    roots = [tmp_path / "logs", tmp_path, tmp_path / "latest", str(tmp_path / "logs" / "b" / "x")]
    assert [run.folder for run in find_runs(roots)] == [
        tmp_path / "logs" / "a",
        tmp_path / "logs" / "b" / "x",
    ]
    with pytest.raises(FileNotFoundError, match=r"roots=.*nowhere: there is no such folder"):
        find_runs([tmp_path / "nowhere"])
