"""A paper's cell and the runs of its setting: what is looked up, what is said of it."""

import pytest
from sample_runs import add_run, curve

from gcfed.report.compare import Settings, compare
from gcfed.report.groups import grouped
from gcfed.report.papers import load
from gcfed.report.tables import Best
from gcfed.runs.folder import find_runs

TOY = """
paper: Toy
table: "1"
title: Accuracy
source: Toy (2024), Table 1
unit: percent
higher_is_better: true
seeds: 2
measure: "last:test/acc"
overrides: [data=digits, model=mlp, rounds=4]
setting: {rounds: 4, client.optimizer.lr: 0.01}
unstated: the batch size
columns:
  - {label: a, overrides: [partition.alpha=0.1]}
  - {label: b, overrides: [partition.alpha=1]}
rows:
  - {label: FedAvg, overrides: [algorithm=fedavg, gc=none]}
  - {label: GC-Fed, overrides: [algorithm=fedavg, gc=gcfed]}
  - {label: FedProx, overrides: [algorithm=fedprox, gc=none]}
  - {label: Lost, overrides: null, note: There is no code of it.}
cells:
  FedAvg: [[50, 3], 60]
  GC-Fed: [[58, 1], 70]
  FedProx: [{mean: 10, note: failed}, 1000+]
  Lost: [40, N/A]
"""
SAME = "data=digits model=mlp gc=none rounds=4"


class Toy:
    """Runs of one federation, and the toy's table beside them."""

    def __init__(self, folder):
        self.folder, self.runs = folder, 0

    def add(self, overrides=SAME, accuracies=(0.1, 0.2, 0.3, 0.5), **kw):
        rows = [row | {"test/acc": acc} for row, acc in zip(curve(0.5, len(accuracies)), accuracies, strict=True)]
        self.runs += 1
        add_run(self.folder / "runs" / str(self.runs), overrides, rows, **kw)

    def table(self, text=TOY, **kw):
        (self.folder / "toy_table1.yaml").write_text(text)
        groups = grouped(find_runs([self.folder / "runs"]))
        (table,) = compare(load(self.folder / "toy_table1.yaml"), groups, Settings(groups), **kw)
        return table

    def column(self, name="a (%)", **kw):
        frame = self.table(**kw).frame
        return dict(zip(frame[""] + frame.groupby("").cumcount().astype(str), frame[name], strict=True))


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)


def test_a_cell_shows_the_runs_of_its_setting_however_they_were_made(toy):
    toy.add()
    toy.add("experiment=digits_mlp_gcfed gc=none rounds=4 eval_every=2 trainer=cpu", (0.1, 0.2, 0.3, 0.7), seed=2)
    toy.add(f"{SAME} client.optimizer.lr=0.1", (0.9, 0.9, 0.9, 0.9), seed=2)  # another setting: of no cell
    toy.add(seed=2, accuracies=(0.1, 0.2, 0.3, 0.6))
    table = toy.table()
    assert list(table.frame.columns) == ["", "a (%)"]  # rows and columns without runs are left out
    assert table.frame.to_numpy().tolist() == [
        ["FedAvg", "55.00 (7.07)"], ["paper", "50.00 (3.00)"], ["difference", "+5.00 (0.7 σ)"],  # √(7.07² + 3²) = 7.68
    ]  # fmt: skip
    assert table.records["mean"].tolist() == [pytest.approx(55)]
    assert "No difference in the settings listed here. Not stated: the batch size" in "".join(table.notes)


def test_what_a_cell_lacks_is_said_in_it(toy):
    toy.add()
    toy.add(seed=2, accuracies=(0.1, 0.2), ended=False)
    toy.add(f"{SAME} gc=gcfed rounds=2", (0.5, 0.6))
    table = toy.table(empty=True)
    a, b = table.frame["a (%)"], table.frame["b (%)"]
    assert [a[0], a[3], a[6], a[8]] == ["50.00 [1 of 2]", "60.00 [1 of 2] (2 of 4 rounds)", "no run", "–"]
    assert b.tolist()[:2] == ["no run", "60.00"]
    notes = "\n".join(table.notes)
    assert "In no mean: FedAvg, a: 2 of 4 rounds at seed 2." in notes
    assert "Ours differs in rounds 2 (paper 4) [GC-Fed]." in notes
    assert "2 of 6 cells have runs, 1 with fewer seeds than the paper's, 1 with other rounds." in notes
    assert "All of them: python src/train.py -m study=toy_table1" in notes


def test_a_run_that_diverged_is_marked(toy):
    add_run(toy.folder / "runs" / "x", SAME, [row | {"test/loss": float("nan")} for row in curve(0.4, 4)])
    assert toy.column()["FedAvg0"].endswith("[1 of 2] †")
    assert toy.column(text=TOY.replace("last:test/acc", "last:test/loss"))["FedAvg0"] == "diverged at seed 1"


def test_the_best_is_of_full_runs_and_of_what_did_not_fail_in_the_paper(toy):
    toy.add()
    toy.add(f"{SAME} algorithm=fedprox", (0.1, 0.2, 0.3, 0.6))
    toy.add(f"{SAME} gc=gcfed rounds=2", (0.5, 0.9))
    assert {name for name, cell in toy.column().items() if isinstance(cell, Best)} == {"FedProx0", "paper1"}  # 58
    frame = toy.table(text=TOY.replace("seeds: 2", "seeds: 2\nmethods_in: columns")).frame
    assert not any(isinstance(cell, Best) for cell in frame["a (%)"])


def test_the_order_of_three_methods_is_compared(toy):
    for method, acc in {"gc=none": 0.5, "gc=gcfed": 0.4, "algorithm=fedprox gc=none": 0.6}.items():
        toy.add(f"data=digits model=mlp rounds=4 {method}", (0.1, 0.2, 0.3, acc))
    note = toy.table(text=TOY.replace("{mean: 10, note: failed}", "10")).notes[-1]
    assert "Spearman's ρ with the paper's: a: -1.00 of 3." in note


def test_a_bound_has_no_difference_and_departures_say_why(toy):
    toy.add()
    text = TOY.replace("last:test/acc", "rounds:test/acc>=0.9").replace("unit: percent", "unit: rounds")
    text = text.replace("lr: 0.01}", "lr: 0.1}\ndepartures: {client.optimizer.lr: It is faster.}")
    table = toy.table(text=text)
    assert table.frame["a"].tolist() == ["4+ [1 of 2]", "50 (3)"]
    assert "Ours differs in client.optimizer.lr 0.01 (paper 0.1: It is faster)." in "".join(table.notes)


def test_a_studys_scale_is_a_table_of_its_own(tmp_path):
    """``study=fedacg_table1a scale=small`` trains another model: those runs are of that table only."""
    small = "experiment=cifar10_resnet18_fedacg algorithm=fedavg model=cnn client.optimizer.lr=0.03 rounds=60"
    small += " eval_every=2"
    add_run(tmp_path / "a", small, curve(0.5, 60))
    groups = grouped(find_runs([tmp_path]))
    (table,) = compare(load("fedacg_table1a"), groups, Settings(groups))
    assert (table.name, table.title.endswith("scale=small")) == ("fedacg_table1a_small", True)
    assert "study=fedacg_table1a scale=small" in "".join(table.notes)
    assert "tags.model cnn (paper resnet18)" in "".join(table.notes)
