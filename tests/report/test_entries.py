"""Which rows of a column have a rank, and how far their order is the paper's."""

import math

import pytest
from toy_table import Runs

from gcfed.report.tables import latex, markdown


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_order_of_the_rows(runs):
    for name, level, kw in (
        ("a", 0.6, {}), ("b", 0.5, {"algorithm": "fedprox", "config": {"methods.proximal.mu": 0.1}}),
    ):  # fmt: skip
        runs.add(name, [level] * 4, **kw)
    assert runs.compared().orders == ()  # of two rows there is none
    runs.add("c", [0.7] * 4, gc="gcfed")
    for name, kw in (("d", {}), ("e", {"algorithm": "fedprox"}), ("f", {"gc": "gcfed"})):
        runs.add(name, [0.5] * 4, alpha=1, **kw)  # the paper's 10.00 there is a word for a run that failed
    (order,) = runs.compared().orders
    # The paper: FedAvg < FedProx < GC-Fed; ours: FedProx < FedAvg < GC-Fed.
    assert (order.column, order.rows, order.spearman, order.kendall) == (
        "α 0.1", 3, pytest.approx(0.5), pytest.approx(1 / 3),
    )  # fmt: skip
    assert any("α 0.1: ρ 0.50, τ 0.33 of 3 rows." in note for note in runs.compared().table.notes)


def test_equal_rows_have_no_order(runs):
    for i, kw in enumerate(({}, {"algorithm": "fedprox", "config": {"methods.proximal.mu": 0.1}}, {"gc": "gcfed"})):
        runs.add(str(i), [0.5] * 4, **kw)
    assert math.isnan(runs.compared().orders[0].kendall)
    assert any("α 0.1: ρ –, τ – of 3 rows." in note for note in runs.compared().table.notes)


def test_unlike_rows_and_bounds_have_no_rank(runs):
    """The best row has ten times the rounds of the others: it is neither bold nor in the order of the rows."""
    prox = {"algorithm": "fedprox", "config": {"methods.proximal.mu": 0.1}}
    for name, level, kw in (("a", 0.4, {}), ("b", 0.5, prox), ("c", 0.6, {"gc": "gcfed"})):
        runs.add(name, [level] * 4, **kw)
    assert [order.column for order in runs.compared().orders] == ["α 0.1"]  # the paper's 4+ rounds are a bound
    runs.add("d", [0.9] * 40, gc="gcfed", seed=2, config={"rounds": 40})
    (runs.folder / "runs" / "c" / "summary.json").unlink()
    comparison = runs.compared()
    assert comparison.orders == ()
    ours = [(row.cells[1].text, row.cells[1].bold, row.cells[1].differs) for row in comparison.table.rows[::3]]
    assert ours[:3] == [("40.00 [1]", False, False), ("50.00 [1]", True, False), ("90.00 [1]", False, True)]
    for text in (markdown(comparison.table), latex(comparison.table).replace(r"$\neq$", "≠")):
        assert text.count("90.00 [1] ≠") == 1
    assert [r["differs_from_paper"] for r in comparison.table.records if r["mean"] == pytest.approx(90)] == ["yes"]
    (told,) = (note for note in comparison.table.notes if "α 0.1 are not alike in rounds" in note)
    assert told.endswith("4 (FedAvg, FedProx), 40 (GC-Fed). Ranked: FedAvg, FedProx.")
