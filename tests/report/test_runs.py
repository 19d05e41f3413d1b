"""What the report reads of run folders: states, notes, columns; nothing that is broken stops it or is dropped."""

import math

import numpy as np
import pytest
import yaml
from run_folders import rows_of, write_run

from gcfed.report.runs import find_runs, read_columns, read_config, read_run


def test_columns_are_as_csv_reads_them(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"round,a,b,c\r\n1,,,\r\n2,0.1,,1e-3\r\n3,,inf,\r\n4,nan,-inf,5\r\n")
    columns = read_columns(path)
    nan, inf = math.nan, math.inf
    wanted = {"round": [1, 2, 3, 4], "a": [nan, 0.1, nan, nan], "b": [nan, nan, inf, -inf], "c": [nan, 1e-3, nan, 5]}
    assert list(columns) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(columns[name], values)


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("", []),
        ("round,a", []),
        ("round,a\n", []),
        ("round,a\n1,2\n", [1]),
        ("round,a\n1,2\n2,3", [1]),
        ("round,a\n1,2\n2", [1]),
    ],
)
def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path, text, rounds):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    assert list(read_columns(path).get("round", [])) == rounds


@pytest.mark.parametrize(
    "text",
    [
        "a:\n  b: 1\nc: 2\n",
        "targets:\n- 0.5\n- 0.6\n# a comment\nrounds: 3\n\nname: x",
        "---\na: 1\n...\n",
        "{a: 1,\nb: {c: 2\n}}\n",
        "a: &x {c: 1}\nb: *x\n",
        'a: "two\n  lines"\nb: |\n  one\n\n  two\n',
        'a: "at\ncolumn 0: x"\nb: 1\n',
        "a: 1\na: 2\n",
        "",
    ],
)
def test_a_config_is_as_yaml_reads_it(text):
    assert read_config(text) == (yaml.safe_load(text) or {})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("config.yaml", "a: [", "ParserError"),
        ("config.yaml", "", "'rounds'"),
        ("config.yaml", "- 1", "TypeError"),
        ("config.yaml", "rounds: many", "ValueError"),
        ("config.yaml", "rounds: 3\nseed: x", "ValueError"),
        ("overrides.yaml", "{", "ParserError"),
        ("summary.json", "{", "JSONDecodeError"),
        ("summary.json", "[1]", "TypeError"),
        ("summary.json", '{"rounds": null}', "TypeError"),
        ("metrics.csv", "round,a\n1\n", "as many cells"),
        ("metrics.csv", "a,b\n1,2\n", "column 'round'"),
        ("metrics.csv", "round,a\n1,x\n", "ValueError"),
    ],
)
def test_files_that_cannot_be_read_make_a_failed_run(tmp_path, name, text, reason):
    write_run(tmp_path / "a", config={}, rows=rows_of([0.5]))
    (tmp_path / "a" / name).write_text(text)
    (run,) = find_runs([tmp_path])
    assert run.state == "failed"
    assert run.note.startswith("its files cannot be read: ")
    assert reason in run.note
    assert "\n" not in run.note
    assert (run.rounds, run.curve("test/acc")[0].size, run.get("tags.nothing", "none")) == (0, 0, "none")
    assert run.seed == (0 if name == "config.yaml" else 1)


def test_a_finished_run_is_one_whatever_lies_beside_it(tmp_path):
    write_run(tmp_path / "a", config={}, rows=rows_of([0.5, 0.6]))
    (tmp_path / "a" / "failure.txt").write_text("RuntimeError: the picture could not be drawn\n")
    run = read_run(tmp_path / "a")
    assert (run.state, run.note, run.rounds) == ("finished", "", 2)


def test_a_run_that_goes_on_for_more_rounds_is_unfinished(tmp_path):
    run = write_run(tmp_path / "a", config={"rounds": 5}, rows=rows_of([0.5, 0.6]))
    assert (run.state, run.note) == ("unfinished", "after round 2 of 5")


def test_a_run_before_its_first_round(tmp_path):
    run = write_run(tmp_path / "a", config={"rounds": 5}, rows=[])
    assert (run.state, run.note, run.rounds, run.columns) == ("unfinished", "after round 0 of 5", 0, {})
    (tmp_path / "a" / "failure.txt").write_text("")
    assert read_run(tmp_path / "a").note == "after round 0 of 5: an error without a message"


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ([{"test/acc": 0.5, "test/loss": 1.0}, {"test/acc": 0.1, "test/loss": None}], "loss of round 2 is not finite"),
        ([{"test/acc": 0.5, "test/loss": 1.0}, {"test/acc": 0.1, "test/loss": -math.inf}], "loss of round 2"),
        ([{"test/acc": 0.1, "test/loss": math.inf}, {"test/acc": 0.5, "test/loss": 1.0}], ""),
        ([{}, {"train/nonfinite_clients": 2}, {"train/nonfinite_clients": 5}], "since round 2 some or all clients"),
        ([{"train/nonfinite_clients": 5}] * 2, "since round 1 some or all clients"),
        ([{"train/nonfinite_clients": 5}, {"train/nonfinite_clients": 4}], ""),
    ],
)
def test_divergence_is_of_the_end(tmp_path, rows, note):
    run = write_run(tmp_path / "a", config={}, rows=rows)
    assert run.state == ("diverged" if note else "finished")
    assert note in run.note
    assert bool(run.note) == bool(note)


def test_a_regression_whose_loss_is_nan_diverged(tmp_path):
    rows = [{"test/loss": 1.0}, {"test/loss": None}]
    run = write_run(tmp_path / "a", config={}, rows=rows, summary={"test/loss": None})
    assert (run.state, run.note) == ("diverged", "its last test loss is not finite")


def test_runs_are_found_once_through_roots_links_and_loops(tmp_path):
    for name in ("b/x", "a", ".hidden"):
        write_run(tmp_path / "logs" / name, config={}, rows=rows_of([0.5]))
    write_run(tmp_path / "logs" / "a" / "inside", config={}, rows=rows_of([0.5]))
    (tmp_path / "logs" / "no_run").mkdir()
    (tmp_path / "logs" / "no_run" / "config.yaml").write_text("a: 1")
    (tmp_path / "logs" / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "latest").symlink_to(tmp_path / "logs" / "a")
    roots = [tmp_path / "logs", tmp_path, tmp_path / "latest", str(tmp_path / "logs" / "b" / "x")]
    assert [run.folder for run in find_runs(roots)] == [tmp_path / "logs" / "a", tmp_path / "logs" / "b" / "x"]
    assert find_runs([tmp_path / "logs" / "no_run"]) == []
    with pytest.raises(FileNotFoundError, match=r"roots=.*nowhere: there is no such folder"):
        find_runs([tmp_path / "nowhere"])
