"""Our runs beside a paper's table: which runs count, what the numbers are, what is said of the rest."""

import json
import math
import os

import pytest
from run_folders import rows_of
from toy_table import Runs, text_of

from gcfed.report.lines import bare, bare_rows
from gcfed.report.sample import sample
from gcfed.report.tables import as_csv, markdown


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_numbers_by_hand(runs):
    for seed, last in ((1, 0.50), (2, 0.54), (3, 0.61)):
        runs.add(f"a{seed}", [0.1, 0.2, 0.40, last], seed=seed)
    entry = runs.cell("FedAvg")
    # Means of the last two rounds: 45, 47, 50.5 %; their mean 47.5; variance ((2.5)² + 0.5² + 3²)/2 = 7.75.
    assert entry.ours.values == pytest.approx((45, 47, 50.5))
    assert entry.ours.seeds == (1, 2, 3)
    assert entry.mean == pytest.approx(47.5)
    assert entry.ours.std == pytest.approx(math.sqrt(7.75))
    assert entry.difference == pytest.approx(-2.5)
    assert entry.deviations == pytest.approx(-2.5 / math.sqrt(7.75 + 9))
    assert (entry.missing, entry.command, entry.others, entry.differences) == ((), "", (), ())
    comparison = runs.compared()
    assert text_of(comparison.table, "FedAvg", 0) == ["47.50 (2.78)", "50.00 (3.00)", "−2.50 (0.6 σ)"]
    assert text_of(comparison.table, "Lost", 0) == ["–", "40.00"]
    assert text_of(comparison.table, "FedProx", 1) == ["–", "10.00, failed"]
    assert text_of(comparison.table, "FedProx", 2) == ["–", "4+"]
    assert comparison.table.title == "Toy, Table 3: Accuracy"
    assert comparison.table.header == ("", "α 0.1 (%)", "α 1 (%)", "rounds to 50 % (rounds)")
    assert "Our settings are the paper's." in comparison.table.notes
    assert comparison.table.notes[-1] == "A note of the table."


def test_the_deviation_that_there_is(runs):
    runs.add("a", [0.1, 0.2, 0.44, 0.44])
    entry = runs.cell("FedAvg")
    assert (entry.ours.std, entry.deviations) == (None, pytest.approx(-2))
    runs.add("b", [0.1, 0.2, 0.64, 0.64], alpha=1.0)
    runs.add("c", [0.1, 0.2, 0.66, 0.66], alpha=1.0, seed=2)
    entry = runs.cell("FedAvg", "α 1")
    assert entry.deviations == pytest.approx(5 / math.sqrt(2))
    runs.add("d", [0.1, 0.2, 0.6, 0.6], gc="gcfed", alpha=1)
    assert runs.cell("GC-Fed", "α 1").difference == pytest.approx(-10)
    assert runs.cell("GC-Fed", "α 1").deviations is None
    assert text_of(runs.compared().table, "GC-Fed", 1) == ["60.00 [1]", "70.00", "−10.00"]


def test_marks_of_ours_and_of_the_papers_apart(runs):
    for name, level, kw in (
        ("a", 0.6, {}), ("b", 0.5, {"algorithm": "fedprox", "config": {"methods.proximal.mu": 0.1}}),
        ("c", 0.4, {"gc": "gcfed"}),
    ):  # fmt: skip
        runs.add(name, [level] * 4, **kw)
    table = runs.compared().table
    marks = {
        (row.cells[0].text, i): (row.cells[1].bold, row.cells[1].underline) for i, row in enumerate(table.rows)
    }.values()
    assert list(marks) == [
        (True, False), (False, False), (False, False),  # FedAvg, the paper's, the difference
        (False, True), (False, True), (False, False),
        (False, False), (True, False), (False, False),
        (False, False), (False, False),
    ]  # fmt: skip


def test_fewer_rounds_are_better_and_a_bound_is_no_number(runs):
    runs.add("a", [0.1, 0.5, 0.6, 0.6])
    runs.add("b", [0.1, 0.1, 0.1, 0.1], seed=2)
    runs.add("c", [0.1, 0.1, 0.5, 0.6], gc="gcfed")
    ours = runs.cell("FedAvg", "rounds to 50 %")
    assert (ours.ours.values, ours.ours.at_least, ours.difference) == ((2, 4), True, None)
    table = runs.compared().table
    assert text_of(table, "FedAvg", 2)[:2] == ["3+ [2]", "3"]
    assert text_of(table, "GC-Fed", 2) == ["3 [1]", "2", "+1"]
    assert any(note.startswith("+: a run that did not reach the target") for note in table.notes)
    papers = [row.cells[3] for row in table.rows if row.cells[0].text == "paper"]
    assert [(cell.text, cell.bold, cell.underline) for cell in papers] == [
        ("3", False, True), ("4+", False, False), ("2", True, False), ("–", False, False),
    ]  # fmt: skip


def test_settings_are_never_mixed(runs):
    """Two rows have 2 rounds, one 4 as the paper: the table shows the column's, and tells of the other."""
    for name, gc, seeds in (("a", "none", (1, 2)), ("b", "gcfed", (1,))):
        for seed in seeds:
            runs.add(f"{name}{seed}", [0.4, 0.4], gc=gc, seed=seed, config={"rounds": 2}, overrides=["rounds=2"])
    runs.add("c", [0.9] * 4)
    runs.add("d", [0.8] * 4, config={"client.optimizer.lr": 0.5})
    entry = runs.cell("FedAvg")
    assert (entry.ours.seeds, entry.mean, entry.differences) == ((1, 2), pytest.approx(40), ("rounds 2 (paper 4)",))
    assert [(other.sample.mean, other.differences) for other in entry.others] == [
        (pytest.approx(90), ("rounds 4",)),
        (pytest.approx(80), ("rounds 4", "client.optimizer.lr 0.5")),
    ]
    notes = " ".join(runs.compared().table.notes)
    assert "Where our setting is not the paper's (≠): everywhere: rounds 2 (paper 4)." in notes
    assert "FedAvg, α 0.1: 90.00 [1] with rounds 4; FedAvg, α 0.1: 80.00 [1] with rounds 4, client.optimizer" in notes
    assert "are not alike" not in notes


def test_the_papers_setting_wins_where_it_has_as_many_rows(runs):
    runs.add("a1", [0.4, 0.4], config={"rounds": 2})
    runs.add("a2", [0.4, 0.4], seed=2, config={"rounds": 2})
    runs.add("c", [0.9] * 4)
    assert runs.cell("FedAvg").ours.seeds == (1,)
    assert runs.cell("FedAvg").mean == pytest.approx(90)


def test_rows_that_are_not_alike_are_told(runs):
    runs.add("a", [0.4] * 4, config={"precision": "bf16-mixed"})
    runs.add("b", [0.5] * 4, gc="gcfed")
    runs.add("c", [0.5] * 4, algorithm="fedprox", config={"methods.proximal.mu": 0.2})
    notes = " ".join(runs.compared().table.notes)
    told = "precision: bf16-mixed (FedAvg), 32-true (FedProx, GC-Fed). Ranked: FedProx, GC-Fed."
    assert f"rows of α 0.1 are not alike in {told}" in notes
    assert "Where our setting is not the paper's (≠): row FedProx: methods.proximal.mu 0.2 (paper 0.1)." in notes


def test_differences_name_columns_and_single_cells(runs):
    runs.add("a", [0.4] * 4, alpha=1, config={"client.optimizer.lr": 0.1})
    runs.add("b", [0.5] * 4, gc="gcfed", alpha=1, config={"client.optimizer.lr": 0.1})
    runs.add("c", [0.5] * 4)
    assert "setting is not the paper's (≠): column α 1: client.optimizer.lr 0.1 (paper 0.01)." in " ".join(
        runs.compared().table.notes
    )
    runs.add("d", [0.5] * 4, gc="gcfed", config={"client.optimizer.lr": 0.2})
    assert "; GC-Fed (α 0.1) and GC-Fed (rounds to 50 %): client.optimizer.lr 0.2 (paper 0.01)." in " ".join(
        runs.compared().table.notes
    )


def test_of_one_seed_the_newest_finished_run_counts(runs):
    for i, (name, level) in enumerate((("z", 0.2), ("y", 0.3), ("x", 0.4))):
        runs.add(name, [level] * 4)
        os.utime(runs.folder / "runs" / name / "summary.json", (1000 * i, 1000 * i))
    runs.add("newest", [0.9], summary=False)
    entry = runs.cell("FedAvg")
    assert (entry.mean, entry.ours.seeds, entry.ours.uncounted) == (pytest.approx(40), (1,), ())
    repeated = {repeat.run.folder.name: repeat.difference for repeat in entry.ours.repeated}
    assert repeated == {"newest": pytest.approx(50), "y": pytest.approx(-10), "z": pytest.approx(-20)}
    note = next(note for note in runs.compared().table.notes if note.startswith("Further runs of one seed"))
    assert "FedAvg, α 0.1, seed 1: y (−10.00); " in note
    # What the runs say themselves counts more than when a copy was written.
    for name, day in (("z", 3), ("y", 2), ("x", 1)):
        path = runs.folder / "runs" / name / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"ended": f"2026-05-0{day}T10:00:00+02:00"}))
    assert runs.cell("FedAvg").mean == pytest.approx(20)


def test_no_state_is_dropped(runs):
    runs.add("a", [0.4] * 4)
    runs.add("b", [], rows=[*rows_of([0.4] * 3), {"test/acc": 0.2, "test/loss": math.inf}], seed=2)
    runs.add("c", [0.4] * 2, seed=3, failure="RuntimeError: out of memory\nTraceback")
    runs.add("d", [0.4] * 3, gc="gcfed", summary=False)
    runs.add("e", [0.4] * 2, alpha=1, failure="OSError: disk full")
    comparison = runs.compared()
    table = comparison.table
    assert text_of(table, "FedAvg", 0)[0] == "35.00 (7.07) [2] †"
    assert text_of(table, "FedAvg", 1)[0] == "failed"
    assert text_of(table, "GC-Fed", 0)[0] == "unfinished"
    states = [[cell.state for cell in row.cells[1:3]] for row in table.rows if not row.minor]
    assert states == [["diverged", "failed"], ["missing"] * 2, ["unfinished", "missing"], ["missing"] * 2]
    diverged = next(note for note in table.notes if note.startswith("Diverged (marked †; in the mean unless its value"))
    assert diverged.endswith("): FedAvg, α 0.1, seed 2: the test loss of round 4 is not finite.")
    failed = next(note for note in table.notes if note.startswith("Failed (in no mean): "))
    assert "FedAvg, α 0.1, seed 3: after round 2 of 4: RuntimeError: out of memory" in failed
    assert "FedAvg, α 1, seed 1: after round 2 of 4: OSError: disk full" in failed
    assert "Unfinished (in no mean): GC-Fed, α 0.1, seed 1: after round 3 of 4." in table.notes
    assert comparison.found
    assert "seed 3: failed after round 2 of 4: RuntimeError" in table.rows[0].cells[1].title


def test_a_diverged_run_without_a_value(runs):
    rows = [{"test/acc": 0.1, "test/loss": math.inf, "train/loss": math.inf}] * 4
    run = runs.add("a", [], rows=rows)
    taken = sample([run], "last:train/loss")
    assert (taken.values, taken.mean, taken.std) == ((), None, None)
    assert (taken.without, taken.diverged, taken.uncounted) == ((run,), (run,), ())


def test_nothing_found(runs):
    comparison = runs.compared()
    assert not comparison.found
    assert comparison.orders == ()
    assert len(comparison.missing) == 6  # the third column reads the first one's runs
    assert text_of(comparison.table, "FedAvg", 0) == ["–", "50.00 (3.00)"]


def test_the_csv_has_every_cell_and_every_other_setting(runs):
    runs.add("a", [0.4] * 4)
    runs.add("b", [0.5] * 4, config={"client.optimizer.lr": 0.5})
    records = runs.compared().table.records
    assert len(records) == 4 * 3 + 2
    first, second = records[:2]
    assert (first["row"], first["column"], first["mean"], first["n"], first["shown"]) == (
        "FedAvg", "α 0.1", pytest.approx(40), 1, "yes",
    )  # fmt: skip
    assert (first["paper_mean"], first["difference"], first["missing_seeds"]) == (50, pytest.approx(-10), "2 3")
    assert (second["mean"], second["shown"], second["setting"]) == (
        pytest.approx(50), "no", "client.optimizer.lr 0.5",
    )  # fmt: skip
    assert {len(record) for record in records} == {len(first)}
    assert as_csv(runs.compared().table).count("\r\n") == len(records) + 1
    assert markdown(runs.compared().table).count("\n|") == 2 + len(runs.compared().table.rows)


def test_rows_and_columns_without_runs_can_be_told(runs):
    runs.add("a", [0.5] * 4)
    runs.add("b", [0.5] * 4, gc="gcfed")
    entries = runs.compared().entries
    assert bare_rows(entries, 3) == [False, True, False, True]
    assert bare(entries, 3) == [False, False, True, False]
