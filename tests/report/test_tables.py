"""Tables as text, and those of any runs."""

import pandas as pd
import pytest
from run_folders import GCFED, PLACE, run_of

from gcfed.report.groups import grouped
from gcfed.report.tables import (
    UNITS,
    Best,
    Minor,
    Table,
    all_runs,
    best,
    describe,
    mark_best,
    marked,
    measured,
    targets,
)

FRAME = pd.DataFrame([["a_b", Best("1.5 %")], [Minor("paper"), "λ | <x>"]], columns=["", "η (%)"], dtype=object)
TABLE = Table("t_1", "A & B", FRAME, pd.DataFrame({"x": [1.0, None]}), ("100 % of `it`.",))


def test_every_form_escapes_and_marks(tmp_path):
    TABLE.write(tmp_path / "new")
    text = {path.suffix: path.read_text() for path in (tmp_path / "new").iterdir()}
    lines = [[cell.strip() for cell in line.split("|")] for line in text[".md"].splitlines()]
    assert lines[0] + lines[-1] == ["## A & B", r"100 % of \`it\`."]
    assert (lines[2][1:3], lines[4][1:3]) == (["", "η (%)"], ["a_b", "**1.5 %**"])
    assert r"| *paper* | λ \| &lt;x>" in text[".md"]
    for part in (r"\caption{A \& B}\label{tab:t_1}", r" & η (\%) \\", r"a\_b & \textbf{1.5 \%} \\", r"\toprule",
                 r"\quad paper & λ | <x> \\", r"\resizebox{\ifdim\width>", r"100 \% of"):  # fmt: skip
        assert part in text[".tex"], part
    assert text[".tex"].count("{") == text[".tex"].count("}")
    assert text[".csv"] == 'x\n1.0\n""\n'
    for part in ("<td><strong>1.5 %</strong></td>", "<td><small>paper</small></td>", "<td>λ | &lt;x&gt;</td>"):
        assert part in TABLE.html()


def test_a_cell_is_a_line_without_links():
    assert marked("a\n[b](javascript:c)", "md") == r"a [b]\(javascript:c)"


@pytest.mark.parametrize(
    ("numbers", "higher", "bold"),
    [([None, 3, 2], True, [1]), ([1, 3, 1], False, [0, 2]), ([1, 3], None, []), ([None, 3], True, [])],
)  # fmt: skip
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
        ("time/round_s", "a round, median", "seconds", None),
    ],
)
def test_any_measure_has_a_title_and_a_unit(measure, title, unit, higher):
    assert describe(measure) == (title, UNITS[unit], higher)


def test_a_federation_is_a_table_of_methods_by_measures():
    runs = [run_of(seed=s, values=(0.1, 0.4 + s / 10)) for s in (1, 2)]
    moon = {"tags.algorithm": "moon", "methods.moon._target_": "gcfed.methods.moon.MOON"}
    runs += [run_of(**GCFED, values=(0.2, 0.9)), run_of("failed", values=(0.2,), **moon)]
    table = measured(grouped(runs), ["last:test/acc", "max:test/acc", "max:test/nothing"], "f", "F")
    assert table.frame.to_dict("list") == {
        "method": ["fedavg", "gcfed", "moon"],
        "accuracy at the end (%)": ["55.00 (7.07)", "90.00 [1 of 2]", "failed at seed 1"],
        "best accuracy (%)": ["55.00 (7.07)", "90.00 [1 of 2]", "–"],
    }
    assert [isinstance(cell, Best) for cell in table.frame["best accuracy (%)"]] == [False, True, False]
    assert table.notes[0].endswith("All: η 0.01, epochs 5.")
    assert f"moon ({PLACE}, 30 rounds): failed at seed 1" in table.notes[1]
    assert table.records["mean"].tolist() == pytest.approx([55, 90, 55, 90])
    assert measured(grouped(runs), ["max:test/nothing"], "f", "F") is None


def test_the_best_of_each_federation_comes_first():
    table = best(grouped([run_of(values=(0.5,)), run_of(**GCFED, values=(0.7,)), run_of(rounds=9, values=(0.3,))]))
    assert table.frame["best"].tolist() == ["gcfed: 70.00 %", "fedavg: 30.00 %"]
    assert table.frame["next"].tolist() == ["fedavg: 50.00 %", "–"]
    assert table.frame["seed by seed"].tolist() == ["–", "–"]  # one seed is no pair
    assert best(grouped([run_of("failed")])) is None


def test_the_best_is_compared_seed_by_seed():
    runs = [run_of(**GCFED, seed=seed, values=(value,)) for seed, value in enumerate((0.6, 0.5, 0.9, 0.7))]
    runs += [run_of(seed=seed, values=(value,)) for seed, value in enumerate((0.5, 0.4, 0.5))]
    table = best(grouped(runs))
    assert table.frame["seed by seed"].tolist() == ["+20, p = 0.25 (3)"]
    assert table.records["pairs"].tolist()[1:] == [3]


def test_targets_that_any_run_reached_are_one_table():
    summary = {"bytes_to_target": {"0.5": 3e6}}
    reached = run_of(values=(0.2, 0.6), targets=[0.5, 0.9], summary=summary)
    runs = [reached, run_of(**GCFED, targets=[0.5], values=(0.2,))]
    columns = {"method": ["fedavg", "gcfed"], "rounds to 50 %": ["2", "1+"], "bytes to 50 % (MB)": ["3", "–"]}
    assert targets(grouped(runs)).frame.to_dict("list") == columns
    assert targets(grouped(runs[1:])) is None


def test_every_run_is_listed_with_how_it_ended():
    runs = [run_of(folder="/a"), run_of("failed", folder="/b", seed=2), run_of("diverged", folder="/c", seed=3)]
    table = all_runs(runs, grouped(runs), {run: run.folder.name for run in runs})
    assert table.frame["state"].tolist() == ["failed", "diverged", "finished"]
    assert table.frame["rounds"].tolist() == ["1 of 30"] * 3
    assert table.frame["final"].tolist() == ["50.00%"] * 3
    assert "error" not in table.frame
