"""Numbers of an edited or foreign ``metrics.csv`` are right, or its run is named."""

import json
import math
import shutil

import pytest
from run_folders import curve, write_run

import gcfed
from gcfed.folders.folder import read_run

ROUNDS = 4


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "logs" / "run", curve(0.5, ROUNDS))


def rows(run):
    return (run.folder / "metrics.csv").read_text().splitlines()


def edited(run, text):
    """The run with another text in its file."""
    content = text if isinstance(text, bytes) else text.encode()
    (run.folder / "metrics.csv").write_bytes(content)
    return read_run(run.folder)


def joined(lines):
    return "\n".join([*lines, ""])


def cells_added(run, *cells):
    return joined(f"{line},{cell}" for line, cell in zip(rows(run), cells, strict=True))


@pytest.mark.parametrize("row", range(1, ROUNDS + 1))
@pytest.mark.parametrize(
    "number", ["0", "-1", "1", "2", "3", "4", "5", "1.2", "1.7", "", "nan", "inf", "x", "1e9"]
)
def test_rounds_that_are_not_1_2_3_are_refused(run, row, number):
    """Each row has each wrong number once. Both 1.2 and 1.7 were read as round 1."""
    lines = rows(run)
    _, rest = lines[row].split(",", 1)
    lines[row] = f"{number},{rest}"
    other = edited(run, joined(lines))
    assert other.has_ended == (number == str(row)), other.reason
    if not other.has_ended:
        assert (
            other.reason.startswith("its files cannot be read: ") or "lacks round" in other.reason
        )


SAME = {
    "a byte order mark": lambda run: "\ufeff" + joined(rows(run)),
    "Windows line ends": lambda run: joined(rows(run)).replace("\n", "\r\n"),
    "empty lines": lambda run: joined(rows(run)).replace("\n", "\n\n"),
    "a further column": lambda run: cells_added(run, "mine/gain", 1, 2, 3, 4),
    "a column without values": lambda run: cells_added(run, "mine/gain", "", "", "", ""),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_these_changes_change_no_number(run, change):
    other = edited(run, change(run))
    assert other.state == "finished"
    assert other.metrics[[*run.metrics]].equals(run.metrics)


WRONG = {
    "Lightning's CSVLogger": (lambda run: "epoch,step,loss\n0,9,0.5\n", "no column round"),
    "semicolons": (lambda run: joined(rows(run)).replace(",", ";"), "no column round"),
    "no rows": (lambda run: joined(rows(run)[:1]), "is missing"),
    "an empty file": (lambda run: "", "is missing"),
    "no end of the last line": (lambda run: "\n".join(rows(run)), "lacks round 4"),
    "a last line cut short": (lambda run: joined(rows(run))[:-9], "lacks round 4"),
    "a row lost": (lambda run: joined(rows(run)[:2] + rows(run)[3:]), "lacks round 2"),
    "a short row": (
        lambda run: joined([*rows(run)[:-1], rows(run)[-1].rpartition(",")[0]]),
        "row 4 of metrics.csv has 9 cells, and its heading 10",
    ),
    "long rows": (
        lambda run: joined([rows(run)[0], *(f"{line}," for line in rows(run)[1:])]),
        "row 1 of metrics.csv has 11 cells, and its heading 10",
    ),
    "decimal commas": (
        lambda run: joined([rows(run)[0], *(row.replace(".", ",") for row in rows(run)[1:])]),
        "cells, and its heading",
    ),
    "a column of texts": (lambda run: cells_added(run, "note", *"abcd"), "'a'"),
    "N/A": (lambda run: cells_added(run, "mine", 1, 2, 3, "N/A"), "'N/A'"),
    "two columns of a name": (lambda run: cells_added(run, "test/acc", 1, 2, 3, 4), "same name"),
    "UTF-16": (lambda run: joined(rows(run)).encode("utf-16"), "can't decode"),
    "zeros": (lambda run: b"\0" * 100, "is missing"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG)
def test_these_changes_are_named(run, change, reason):
    other = edited(run, change(run))
    assert other.state == "failed"
    assert reason in other.reason


@pytest.mark.parametrize("text", ["nan", "NaN", "NAN", "-nan"])
def test_a_last_value_that_is_not_finite_is_not_replaced_by_an_earlier_one(run, text):
    """An empty cell was not measured: there, the last test is that of an earlier round."""
    lines = rows(run)
    place = lines[0].split(",").index("test/acc")
    for cell, is_finite in ((text, False), ("", True)):
        last = lines[-1].split(",")
        last[place] = cell
        other = edited(run, joined([*lines[:-1], ",".join(last)]))
        assert math.isfinite(other.curve("test/acc").iloc[-1]) == is_finite


def test_a_summary_of_other_rounds_is_no_end_of_these(run):
    """The run began anew from an older checkpoint."""
    path = run.folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rounds": 9}))
    assert (
        read_run(run.folder).reason == "it has ended after round 9, but metrics.csv lacks round 5"
    )
    path.write_text("[1, 2]")
    reason = "its files cannot be read: summary.json holds a list, not keys with values"
    assert read_run(run.folder).reason == reason


def test_runs_names_what_it_leaves_out(run, caplog):
    broken = run.folder.with_name("broken")
    shutil.copytree(run.folder, broken)
    (broken / "metrics.csv").write_text("a,b\n1,2\n")
    frame = gcfed.runs(run.folder.parent)
    assert [*frame["folder"]] == [str(run.folder)]
    assert caplog.messages == [
        f"Left out: {broken}: its files cannot be read: metrics.csv has no column round"
    ]
    shutil.rmtree(run.folder)
    assert gcfed.runs(broken.parent).empty
