"""Tables as text, and those of any runs."""

import csv
import io

import pandas as pd
import pytest
from test_groups import GCFED, run_of

from gcfed.report.groups import grouped
from gcfed.report.tables import (
    UNITS,
    Best,
    Minor,
    Table,
    all_runs,
    best,
    describe,
    main_measure,
    mark_best,
    measured,
    targets,
)

FRAME = pd.DataFrame([["a_b", Best("1.5 %")], [Minor("paper"), "λ | <x>"]], columns=["", "η (%)"])
TABLE = Table("t_1", "A & B", FRAME, pd.DataFrame({"x": [1.0, None]}), ("100 % of `it`.",))


def test_markdown_escapes_and_marks():
    assert TABLE.markdown().splitlines() == [
        "## A & B", "", "|  | η (%) |", "| --- | --- |", "| a_b | **1.5 %** |", "| *paper* | λ \\| &lt;x> |", "",
        "100 % of \\`it\\`.",
    ]  # fmt: skip


def test_latex_escapes_marks_and_is_not_wider_than_the_text():
    text = TABLE.latex()
    for part in (r"\caption{A \& B}\label{tab:t_1}", r" & $\eta$ (\%) \\", r"a\_b & \textbf{1.5 \%} \\", r"\toprule",
                 r"\quad paper & $\lambda$ \textbar{} \textless{}x\textgreater{} \\", r"\resizebox{\ifdim\width>",
                 r"100 \% of"):  # fmt: skip
        assert part in text, part
    assert text.count("{") == text.count("}")


def test_files(tmp_path):
    TABLE.write(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"t_1.md", "t_1.tex", "t_1.csv"}
    assert list(csv.reader(io.StringIO((tmp_path / "new" / "t_1.csv").read_text()))) == [["x"], ["1.0"], [""]]


@pytest.mark.parametrize(
    ("numbers", "higher", "bold"),
    [
        ([1, 3, 2], True, [1]),
        ([1, 3, 1], False, [0, 2]),
        ([1, 3], None, []),
        ([None, 3], True, []),
        ([2, 2], True, []),
        ([None, 3, 2], True, [1]),
    ],
)
def test_the_best_is_bold(numbers, higher, bold):
    cells = mark_best(list("abc")[: len(numbers)], numbers, higher)
    assert [i for i, cell in enumerate(cells) if isinstance(cell, Best)] == bold


@pytest.mark.parametrize(
    ("measure", "title", "unit", "higher"),
    [
        ("max:test/acc", "best accuracy", "percent", True),
        ("rounds:test/acc>=0.8", "rounds to 80 %", "rounds", False),
        ("rounds:test/loss<=0.5", "rounds to 0.5 of test/loss", "rounds", False),
        ("bytes_to_target/0.8", "bytes to 80 %", "MB", False),
        ("client_seconds_to_target/0.8", "client seconds to 80 %", "seconds", False),
        ("acc_diff/std", "acc_diff/std", "percent", None),
        ("mean:gap/l2", "mean:gap/l2", "none", None),
    ],
)
def test_any_measure_has_a_title_and_a_unit(measure, title, unit, higher):
    assert describe(measure) == (title, UNITS[unit], higher)


def groups_of(*runs):
    return grouped(runs)


def test_a_federation_is_a_table_of_methods_by_measures():
    runs = [run_of(seed=s, values=(0.1, 0.4 + s / 10)) for s in (1, 2)]
    runs += [
        run_of(**GCFED, values=(0.2, 0.9)),
        run_of("failed", values=(0.2,), **{"tags.algorithm": "moon", "methods.moon.mu": 1}),
    ]
    table = measured(groups_of(*runs), ["last:test/acc", "max:test/acc", "max:test/nothing"], "f", "F")
    assert table.frame.to_dict("list") == {
        "method": ["fedavg", "gcfed", "moon"],
        "accuracy at the end (%)": ["55.00 (7.07)", "90.00 [1 of 2]", "failed at seed 1"],
        "best accuracy (%)": ["55.00 (7.07)", "90.00 [1 of 2]", "–"],
    }
    assert [isinstance(cell, Best) for cell in table.frame["best accuracy (%)"]] == [False, True, False]
    assert table.notes[0].endswith("All: η 0.01, epochs 5.")
    assert "moon (digits, mlp, 5 of 20 clients, Dirichlet 0.1, 30 rounds): failed at seed 1" in table.notes[1]
    assert table.records["mean"].tolist() == pytest.approx([55, 90, 55, 90])
    assert measured(groups_of(*runs), ["max:test/nothing"], "f", "F") is None


def test_the_best_of_each_federation_comes_first():
    runs = [run_of(values=(0.5,)), run_of(**GCFED, values=(0.7,)), run_of(rounds=9, values=(0.3,))]
    table = best(groups_of(*runs))
    assert table.frame["best"].tolist() == ["gcfed: 70.00 %", "fedavg: 30.00 %"]
    assert table.frame["next"].tolist() == ["fedavg: 50.00 %", "–"]
    assert best(groups_of(run_of("failed"))) is None
    assert main_measure(groups_of(*runs)) == "mean:test/acc[10]"


def test_targets_that_any_run_reached_are_one_table():
    summary = {"bytes_to_target": {"0.5": 3e6, "0.9": None}}
    runs = [
        run_of(values=(0.2, 0.6), targets=[0.5, 0.9], summary=summary),
        run_of(**GCFED, values=(0.2,), targets=[0.5]),
    ]
    table = targets(groups_of(*runs))
    assert table.frame.to_dict("list") == {
        "method": ["fedavg"], "rounds to 50 %": ["2"], "bytes to 50 % (MB)": ["3"],
    }  # fmt: skip
    assert targets(groups_of(runs[1])) is None


def test_every_run_is_listed_with_how_it_ended():
    runs = [run_of(folder="/a"), run_of("failed", folder="/b", seed=2), run_of("diverged", folder="/c", seed=3)]
    table = all_runs(runs, groups_of(*runs), {run.folder: run.folder.name for run in runs})
    assert table.frame["state"].tolist() == ["failed", "diverged", "finished"]
    assert table.frame["rounds"].tolist() == ["1 of 30"] * 3
    assert table.frame["final"].tolist() == ["50.00%"] * 3
    assert "error" not in table.frame
