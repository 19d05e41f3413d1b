"""Tables as text, and how numbers are shown."""

import pandas as pd
import pytest

from gcfed.report.tables import Best, Table, in_bold, marked
from gcfed.runs.measures import UNITS, describe

FRAME = pd.DataFrame([["a_b", Best("1.5 %")], ["paper", "λ | <x>"]], columns=["", "η (%)"], dtype=object)
TABLE = Table("t_1", "A & B", FRAME, pd.DataFrame({"x": [1.0, None]}), ("100 % of `it`.",))


def test_every_form_escapes_and_marks(tmp_path):
    TABLE.write(tmp_path / "new")
    text = {path.suffix: path.read_text() for path in (tmp_path / "new").iterdir()}
    lines = [[cell.strip() for cell in line.split("|")] for line in text[".md"].splitlines()]
    assert lines[0] + lines[-1] == ["## A & B", r"100 % of \`it\`."]
    assert (lines[2][1:3], lines[4][1:3]) == (["", "η (%)"], ["a_b", "**1.5 %**"])
    assert r"| paper | λ \| &lt;x>" in text[".md"]
    for part in (r"\caption{A \& B}\label{tab:t_1}", r" & η (\%) \\", r"a\_b & \textbf{1.5 \%} \\", r"\toprule",
                 r"paper & λ | <x> \\", r"\resizebox{\ifdim\width>", r"100 \% of"):  # fmt: skip
        assert part in text[".tex"], part
    assert text[".tex"].count("{") == text[".tex"].count("}")
    assert text[".csv"] == 'x\n1.0\n""\n'
    for part in ("<td><strong>1.5 %</strong></td>", "<td>paper</td>", "<td>λ | &lt;x&gt;</td>"):
        assert part in TABLE.html()


def test_a_cell_is_a_line_without_links():
    assert marked("a\n[b](javascript:c)", "md") == r"a [b]\(javascript:c)"


@pytest.mark.parametrize(
    ("numbers", "higher", "bold"),
    [
        ([None, 3, 2], True, [1]), ([1, 3, 1], False, [0, 2]), ([1, 3], None, []), ([None, 3], True, []),
        ([2, 2], True, []),
    ],
)  # fmt: skip
def test_the_best_of_a_group_is_bold(numbers, higher, bold):
    lines = pd.DataFrame({"text": list("abc")[: len(numbers)], "rank": numbers, "higher": higher}, dtype=object)
    other = pd.DataFrame({"text": ["x"], "rank": [100], "higher": True, "by": 2}, dtype=object)
    cells = in_bold(pd.concat([lines.assign(by=1), other], ignore_index=True), ["by"])
    assert [i for i, cell in enumerate(cells) if isinstance(cell, Best)] == bold


@pytest.mark.parametrize(
    ("measure", "title", "unit", "higher"),
    [
        ("max:test/acc", "best accuracy", "percent", True),
        ("mean:test/acc[10]", "accuracy, last 10 rounds", "percent", True),
        ("last:val/loss", "validation loss at the end", "none", False),
        ("rounds:test/acc>=0.8", "rounds to 80 %", "rounds", False),
        ("rounds:test/loss<=0.5", "rounds to 0.5 of test/loss", "rounds", False),
        ("bytes_to_target/0.8", "bytes to 80 %", "MB", False),
        ("rounds_to_target/0.8", "rounds to 80 %", "rounds", False),
        ("rounds_to_target_ema/0.8", "rounds_to_target_ema/0.8", "rounds", False),
        ("time/round_s", "a round, median", "seconds", None),
    ],
)
def test_any_measure_has_a_title_and_a_unit(measure, title, unit, higher):
    assert describe(measure) == (title, *UNITS[unit], higher, measure)
