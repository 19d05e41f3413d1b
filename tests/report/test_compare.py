"""A paper's cell and the runs of its setting: what is looked up, what is said of it."""

import pytest
from conftest import composer
from run_folders import accuracies, write_run

from gcfed.report.compare import Settings, compare
from gcfed.report.groups import grouped
from gcfed.report.tables import Best
from gcfed.runs.folder import find_runs
from gcfed.study.papers import load

TOY = """
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
SAME = "data=digits model=mlp algorithm=fedavg gc=none rounds=4"
GCFED = SAME.replace("none", "gcfed")


@pytest.fixture(autouse=True)
def _one_composer(monkeypatch):
    """What is composed for the runs need not be composed again for the cells."""
    monkeypatch.setattr("gcfed.report.compare.Composer", lambda: composer)


@pytest.fixture
def add(tmp_path):
    """Adds a run that ends with these accuracies."""

    def write(overrides=SAME, *values, **kw):
        name = f"runs/{len(list(tmp_path.glob('runs/*')))}"
        write_run(tmp_path / name, accuracies(*values or (0.1, 0.2, 0.3, 0.5)), overrides, **kw)

    return write


@pytest.fixture
def toy(tmp_path):
    """``toy(replacements)``: the table, with other text, beside the runs."""

    def table(*changes, empty=False):
        text = TOY
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "toy_table1.yaml").write_text(text)
        groups = grouped(find_runs([tmp_path / "runs"]))
        (found,) = compare(load(tmp_path / "toy_table1.yaml"), groups, Settings(groups), empty=empty)
        return found

    return table


def test_a_cell_shows_the_runs_of_its_setting_however_they_were_made(add, toy):
    add()
    add("experiment=digits_mlp_gcfed gc=none rounds=4 eval_every=2 trainer=cpu", 0.1, 0.2, 0.3, 0.7, seed=2)
    add(f"{SAME} client.optimizer.lr=0.1", 0.9, 0.9, 0.9, 0.9, seed=2)  # another setting: of no cell
    add(SAME, 0.1, 0.2, 0.3, 0.6, seed=2)
    table = toy()
    assert list(table.frame.columns) == ["", "a (%)"]  # rows and columns without runs are left out
    assert table.frame.to_numpy().tolist() == [
        ["FedAvg", "55.00 (7.07)"], ["paper", "50.00 (3.00)"], ["difference", "+5.00 (0.7 σ)"],  # √(7.07² + 3²) = 7.68
    ]  # fmt: skip
    assert "No difference in the settings listed here. Not stated: the batch size" in table.notes[0] + table.notes[1]


def test_runs_in_another_precision_are_of_the_cell_and_it_says_so(add, toy):
    add(f"{SAME} precision=bf16-mixed")
    add(f"{GCFED} precision=bf16-mixed", 0.1, 0.2, 0.3, 0.8)
    add(GCFED, 0.1, 0.2, 0.3, 0.6)  # the cell's own precision wins
    table = toy()
    assert table.frame["a (%)"].tolist()[::3] == ["50.00 [1 of 2]", "60.00 [1 of 2]"]
    assert table.notes[1].startswith("Ours differs in precision bf16-mixed [FedAvg].")


def test_a_run_of_the_papers_rounds_wins_over_a_longer_one(add, toy):
    add(f"{SAME} rounds=5", 0.1, 0.1, 0.1, 0.1, 0.9)
    add()
    assert toy().frame["a (%)"].tolist()[0] == "50.00 [1 of 2]"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_equal_groups_the_one_that_tested_more_often_wins(add, toy, order):
    for every in order:
        add(f"{SAME} eval_every={every}", *((0.1, 0.2, 0.3, 0.5) if every == 1 else (None, 0.3, None, 0.7)))
    assert toy().frame["a (%)"].tolist()[0] == "50.00 [1 of 2]"


def test_the_group_with_more_results_wins_over_one_with_more_beginnings(add, toy):
    add(f"{SAME} eval_every=2", None, 0.1, None, 0.4)
    for seed in (2, 3, 4):
        add(f"{SAME} eval_every=2", None, 0.1, seed=seed, ended=False)
    add()
    add(seed=2)
    assert toy().frame["a (%)"].tolist()[0].startswith("50.00")


def test_what_a_cell_lacks_is_said_in_it(add, toy):
    add()
    add(SAME, 0.1, 0.2, seed=2, ended=False)
    add(f"{GCFED} rounds=2", 0.5, 0.6)
    table = toy(empty=True)
    a, b = table.frame["a (%)"], table.frame["b (%)"]
    assert [a[0], a[3], a[6], a[8]] == ["50.00 [1 of 2]", "60.00 [1 of 2] (2 of 4 rounds)", "no run", "–"]
    assert b.tolist()[:2] == ["no run", "60.00"]
    assert table.notes[1].startswith("Ours differs in rounds 2 (paper 4) [GC-Fed].")
    assert table.notes[2:] == [
        "In no mean: FedAvg, a: 2 of 4 rounds at seed 2.",
        "2 of 6 cells have runs. All of them: python src/train.py -m study=toy_table1",
    ]


def test_a_run_that_diverged_is_marked(add, toy):
    add(SAME, 0.1, 0.2, 0.3, float("nan"))
    assert toy().frame["a (%)"][0] == "diverged at seed 1"
    assert toy(("last:test/acc", "min:test/acc")).frame["a (%)"][0].endswith("[1 of 2] †")


def test_a_run_stopped_early_is_not_full(add, toy):
    add(f"{SAME} callbacks=early_stopping", 0.1, 0.9, summary={"rounds": 2, "stopped": "no better"})
    add(GCFED, 0.1, 0.2, 0.3, 0.6)
    assert toy().frame["a (%)"].tolist()[0] == "90.00 [1 of 2] (2 of 4 rounds)"


def test_what_failed_in_the_paper_has_no_deviation_to_count_in(add, toy):
    for seed, last in ((1, 0.4), (2, 0.6)):
        add(SAME, 0.1, 0.2, 0.3, last, seed=seed)
    failed = toy(("[50, 3]", "{mean: 50, note: failed}"))
    assert failed.frame["a (%)"].tolist() == ["50.00 (14.14)", "50.00, failed", "+0.00"]


def test_the_best_is_of_full_runs_and_of_what_did_not_fail_in_the_paper(add, toy):
    add()
    add(SAME.replace("fedavg", "fedprox"), 0.1, 0.2, 0.3, 0.6)
    add(f"{GCFED} rounds=2", 0.5, 0.9)
    assert [c for c in toy().frame["a (%)"] if isinstance(c, Best)] == ["58.00 (1.00)", "60.00 [1 of 2]"]
    frame = toy(("seeds: 2", "seeds: 2\nmethods_in: columns")).frame
    assert not any(isinstance(cell, Best) for cell in frame["a (%)"])


def test_a_bound_has_no_difference_and_departures_say_why(add, toy):
    add()
    departure = ("lr: 0.01}", "lr: 0.1}\ndepartures: {client.optimizer.lr: It is faster.}")
    table = toy(("last:test/acc", "rounds:test/acc>=0.9"), ("unit: percent", "unit: rounds"), departure)
    assert table.frame["a"].tolist() == ["4+ [1 of 2]", "50 (3)"]
    assert "Ours differs in client.optimizer.lr 0.01 (paper 0.1: It is faster)." in table.notes[1]


def test_a_studys_scale_is_a_table_of_its_own(tmp_path):
    """``study=fedacg_table1a scale=small`` trains another model: those runs are of that table only."""
    small = "experiment=cifar10_resnet18_fedacg algorithm=fedavg model=cnn ~model.groups client.optimizer.lr=0.03"
    groups = grouped([write_run(tmp_path / "a", accuracies(*[0.5] * 60), f"{small} rounds=60 eval_every=2")])
    (table,) = compare(load("fedacg_table1a"), groups, Settings(groups))
    assert (table.name, "(scale=small: model=cnn" in table.title) == ("fedacg_table1a_small", True)
    assert "study=fedacg_table1a scale=small" in table.notes[-1]
    assert "tags.model cnn (paper resnet18)" in table.notes[1]


def test_a_scale_has_its_own_rows_and_columns(tmp_path):
    """Of Table 6 the small scale has ResNet18's rows, with the CNN; the rows of VGG11 would be the same runs."""
    small = "experiment=cifar100_resnet18_gcfed algorithm=fedavg gc=none model=cnn rounds=60 eval_every=5"
    groups = grouped([write_run(tmp_path / "a", accuracies(*[0.5] * 60), small)])
    (table,) = compare(load("gcfed_table6"), groups, Settings(groups))
    assert table.records["row"].unique().tolist() == ["ResNet18 FedAvg"]
    assert "1 of 10 cells have runs" in table.notes[-1]
