"""Tables as Markdown, LaTeX and CSV, their marks, and the orders of two columns."""

import csv
import io
import math

import pytest

from gcfed.report import papers
from gcfed.report.compare import compare
from gcfed.report.ranks import kendall, ranks, spearman
from gcfed.report.tables import Cell, Row, Table, as_csv, latex, markdown, marked, write_table
from gcfed.report.units import unit

TABLE = Table(
    name="gcfed_table5",
    title="Accuracy (%)",
    header=("", "α 0.1 | a_b", "50 & more"),
    rows=(
        Row((Cell("FedAvg"), Cell("61.20 (0.80)", bold=True), Cell("–", state="missing", title="seed 1"))),
        Row((Cell("paper"), Cell("59.45 (3.72)", underline=True), Cell("1000+")), minor=True),
        Row((Cell("GC-Fed #1"), Cell("<10 *†"), Cell("−1.50 (0.4 σ)"))),
    ),
    notes=("Costs $5, ~ 3^2 \\ {x}.",),
    records=({"row": "FedAvg", "mean": 0.1 + 0.2, "std": None}, {"row": 'a "b", c', "mean": math.inf, "std": 1e-17}),
)


def test_markdown():
    assert markdown(TABLE) == (
        "## Accuracy (%)\n"
        "\n"
        "|  | α 0.1 \\| a_b | 50 & more |\n"
        "| --- | ---: | ---: |\n"
        "| FedAvg | **61.20 (0.80)** | – |\n"
        "| *paper* | <ins>59.45 (3.72)</ins> | 1000+ |\n"
        "| GC-Fed #1 | &lt;10 \\*† | −1.50 (0.4 σ) |\n"
        "\n"
        "Costs $5, ~ 3^2 \\\\ {x}.\n"
    )
    assert markdown(TABLE, level=4).startswith("#### Accuracy")


def test_latex():
    assert latex(TABLE).splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{Accuracy (\%)}",
        r"\label{tab:gcfed_table5}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r" & $\alpha$ 0.1 \textbar{} a\_b & 50 \& more \\",
        r"\midrule",
        r"FedAvg & \textbf{61.20 (0.80)} & -- \\",
        r"\quad paper & \underline{59.45 (3.72)} & 1000+ \\",
        r"\addlinespace",
        r"GC-Fed \#1 & \textless{}10 *\textdagger{} & $-$1.50 (0.4 $\sigma$) \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\medskip{\footnotesize Costs \$5, \textasciitilde{} 3\textasciicircum{}2 \textbackslash{} \{x\}.\par}",
        r"\end{table}",
    ]


@pytest.mark.parametrize("paper", papers.names())
def test_latex_can_be_set_with_any_engine(paper):
    """pdflatex stops at characters that its fonts lack, such as those of 10⁻³."""
    text = latex(compare(papers.load(paper), []).table)
    assert {character for character in text if not character.isascii()} == set()


def test_numbers_go_to_the_right_and_texts_to_the_left():
    rows = (("a", "–", "2 of 3", "failed", "", "note 1"), ("1", "–", "–", "3.00", "", ""))
    table = Table("t", "T", ("h",) * 6, tuple(Row(tuple(map(Cell, row))) for row in rows))
    assert markdown(table).splitlines()[3] == "| --- | --- | ---: | ---: | --- | --- |"
    assert r"\begin{tabular}{llrrll}" in latex(table)
    assert markdown(Table("t", "T", ("a", "b"), ())).splitlines()[3] == "| --- | --- |"


def test_csv_reads_back_exactly():
    first, second = csv.DictReader(io.StringIO(as_csv(TABLE)))
    assert (first["row"], float(first["mean"]), first["std"]) == ("FedAvg", 0.1 + 0.2, "")
    assert (second["row"], float(second["mean"]), float(second["std"])) == ('a "b", c', math.inf, 1e-17)


def test_files_are_replaced_whole(tmp_path):
    paths = write_table(TABLE, tmp_path / "new" / "tables")
    assert [path.name for path in paths] == ["gcfed_table5.md", "gcfed_table5.tex", "gcfed_table5.csv"]
    paths[0].write_text("old")
    write_table(TABLE, tmp_path / "new" / "tables")
    assert paths[0].read_text(encoding="utf-8") == markdown(TABLE)
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)


@pytest.mark.parametrize(
    ("values", "higher", "marks"),
    [
        ([1.0, 3.0, 2.0, None], True, " bu "),
        ([1.0, 3.0, 2.0, None], False, "b u "),
        ([3.0, 3.0, 2.0, 2.0, 1.0], True, "bbuu "),
        ([3.0, None], True, "  "),
        ([3.0, 3.0], True, "  "),
        ([1.0, 2.0], None, "  "),
        ([], True, ""),
    ],
)
def test_best_is_bold_and_second_underlined(values, higher, marks):
    cells = marked([Cell(str(value)) for value in values], values, higher)
    assert "".join("b" if cell.bold else "u" if cell.underline else " " for cell in cells) == marks


def test_units():
    assert [unit("percent").text(61.204), unit("percent").factor * 0.5] == ["61.20", 50]
    assert [unit("rounds").text(number) for number in (1000.0, 12.34, 0.0)] == ["1000", "12.3", "0"]
    assert [unit("seconds").text(24.68), unit("1e-3").text(1.2346), unit("none").text(0.00012346)] == [
        "24.7", "1.235", "0.0001235",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'hours': the units are percent, rounds"):
        unit("hours")


def test_ranks_share_places():
    assert ranks([30, 10, 20, 20, 40]) == [4, 1, 2.5, 2.5, 5]


@pytest.mark.parametrize(
    ("a", "b", "rho", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1, 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1, -1),
        # Differences of the ranks 0, 1, 1: ρ = 1 − 6·2/(3·8); one of three pairs the other way round.
        ([1, 2, 3], [1, 3, 2], 0.5, 1 / 3),
        # 1 − 6·(1 + 1 + 4 + 1 + 1)/(5·24); pairs the other way round: (1,2), (3,4), (3,5), so 7 − 3 of 10.
        ([1, 2, 3, 4, 5], [2, 1, 5, 3, 4], 1 - 6 * 8 / 120, 0.4),
        # b's first two tie: ranks 1.5, 1.5, 3. ρ: 1.5/√(2·1.5); τ_b: 2/√(3·2).
        ([1, 2, 3], [5, 5, 9], math.sqrt(3) / 2, 2 / math.sqrt(6)),
        ([1, 2, 3], [7, 7, 7], math.nan, math.nan),
    ],
)
def test_agreement_of_orders(a, b, rho, tau):
    assert spearman(a, b) == pytest.approx(rho, abs=1e-12, nan_ok=True)
    assert kendall(a, b) == pytest.approx(tau, abs=1e-12, nan_ok=True)
    assert spearman(b, a) == pytest.approx(rho, abs=1e-12, nan_ok=True)
    assert kendall(b, a) == pytest.approx(tau, abs=1e-12, nan_ok=True)
