"""A table compares its runs with the printed numbers: the text of each cell, and what a reader must
know.
"""

import json

import pandas as pd
import pytest
from pretend import Trainer, go, plain
from run_folders import accuracies

from gcfed.tables.records import RESULT

TOY = {
    "paper": "Toy",
    "table": "1",
    "title": "Accuracies",
    "source": "A paper, Table 1",
    "seeds": 2,
    "measure": "last:test/acc",
    "overrides": ["data=digits", "model=mlp", "rounds=4"],
    "unstated": "the batch size",
    "setting": {"rounds": 4, "client.optimizer.lr": 0.01},
    "columns": [
        {"label": c, "overrides": [f"partition.alpha={a}"]} for c, a in (("a", 0.1), ("b", 1))
    ],
    "rows": [
        {"label": "FedAvg", "overrides": ["algorithm=fedavg"]},
        {"label": "FedProx", "overrides": ["algorithm=fedprox"]},
        {"label": "Lost", "overrides": None, "note": "There is no code of it."},
    ],
    "cells": {
        "FedAvg": [[50, 3], 60],
        "FedProx": [{"mean": 10, "note": "failed"}, "1000+"],
        "Lost": [40, "N/A"],
    },
}


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """``cells(trainer, *words, **node)``: {(row, column): (ours, paper, difference)}, and the
    page's Markdown.
    """

    def made(trainer, *words, name="toy", **node):
        plain.logs = tmp_path / "logs" / name
        go(monkeypatch, tmp_path, trainer, TOY | node, "columns=[a]", *words, name=name)
        folder = tmp_path / "logs" / name / "study" / name / "full"
        frame = pd.read_csv(folder / "comparison.csv", dtype=str, keep_default_na=False)
        found = {(c.row, c.column): (c.ours, c.paper, c.difference) for c in frame.itertuples()}
        return found, (folder / "comparison.md").read_text()

    return made


def test_a_cell_has_our_mean_the_printed_number_and_their_difference(cells):
    found, text = cells(Trainer(lambda values, number: {"1": 0.5, "2": 0.6}[values["seed"]]))
    assert found == {
        # Welch's test: t = 5 / √(7.07²/2 + 3²/2) = 0.92 with 1.3 degrees of freedom
        ("FedAvg", "a (%)"): ("55.00 (7.07)", "50.00 (3.00)", "+5.00 (p 0.49)"),
        ("FedProx", "a (%)"): ("55.00 (7.07)", "10.00, failed", "+45.00"),
    }
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    assert [line[0] for line in lines[2:]] == [
        name for row in ("FedAvg", "FedProx") for name in (row, "*paper*", "*difference*")
    ]
    assert "Source: A paper, Table 1." in text
    assert "Not stated: the batch size; ours are the experiment's." in text
    assert "Ours differs" not in text


def test_a_cell_shows_diverged_and_missing_runs(cells):
    def of(values, number):
        if values["algorithm"] == "fedprox":
            return "no memory"
        return accuracies(*[0.1, 0.2, 0.3, float("nan") if values["seed"] == "2" else 0.5])

    found, text = cells(Trainer(of), "client.optimizer.lr=0.1")
    assert found["FedAvg", "a (%)"] == ("50.00 † [1 of 2]", "50.00 (3.00)", "+0.00 (p 1)")
    assert found["FedProx", "a (%)"][0] == "no run"
    assert "Ours differs in client.optimizer.lr 0.1 (paper 0.01)." in text


def test_a_bound_has_no_difference_and_departures_say_why(cells):
    departures = {"client.optimizer.lr": "It is faster."}
    node = {
        "measure": "rounds:test/acc>=0.9",
        "unit": "rounds",
        "departures": departures,
        "setting": {"client.optimizer.lr": 0.1},
    }
    found, text = cells(
        Trainer(lambda values, number: 0.95 if values["seed"] == "1" else 0.5), **node
    )
    # one run needs one round, the other more than four
    assert found["FedAvg", "a"] == ("2+", "50 (3)", "")
    assert "Ours differs in client.optimizer.lr 0.01 (paper 0.1: It is faster)." in text


def test_compare_alone_trains_nothing_and_counts_only_finished_runs(cells):
    trainer = Trainer()
    scales = {"full": {"overrides": ["model.hidden=[8]"]}}
    cells(trainer, "rows=[FedAvg]", scales=scales)
    (trainer.folders[1] / "summary.json").unlink()  # seed 2 has all rows, but has not ended
    found, text = cells(trainer, "compare=true", scales=scales)
    assert len(trainer.jobs) == 2
    assert found["FedAvg", "a (%)"][0] == "50.00 [1 of 2]"
    assert "## Toy, Table 1, Accuracies (scale=full, 4 rounds)" in text


def test_a_cell_whose_runs_are_of_two_versions_says_so(cells):
    """Such as a table that was continued after an update."""
    trainer = Trainer()
    _, text = cells(trainer, "rows=[FedAvg]")
    assert "versions" not in text
    path = trainer.folders[1] / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "9.1"}))
    _, text = cells(trainer, "rows=[FedAvg]", "compare=true")
    folders = f"(9.1: {trainer.folders[1]}; not recorded: {trainer.folders[0]})"
    assert f"Runs of different versions are compared {folders}." in text


def test_heading_differences_and_measure_come_from_the_runs(cells):
    """The arguments replace the rounds of the table, and other keys that no setting lists."""
    words = ("rounds=2", "data.limit_train=2000", "eval_every=2", "extras.figures=false")
    node = {"overrides": ["rounds=40"], "setting": {"rounds": 40}, "measure": "mean:test/acc[10]"}
    found, text = cells(Trainer(lambda values, number: accuracies(0.3, 0.6)), *words, **node)
    assert "## Toy, Table 1, Accuracies (scale=full, 2 rounds)" in text
    assert "Ours differs in rounds 2 (paper 40)." in text
    changes = "rounds=2, data.limit_train=2000, eval_every=2"
    assert f"Other than the whole table: {changes}." in text
    # neither the mean of all tests nor a difference to another number of rounds
    assert found["FedAvg", "a (%)"] == ("60.00 (0.00)", "50.00 (3.00)", "")
    assert "Measure: test accuracy (last:test/acc)." in text
    assert "Runs with other rounds than the paper's have no difference to its numbers." in text


@pytest.mark.parametrize(
    ("rounds", "ours", "words"),
    [
        (29, "50.00 (0.00)", "test accuracy (last:test/acc)"),
        (30, "41.00 (0.00)", "test accuracy, last 10 rounds (mean:test/acc[10])"),
    ],
)
def test_a_mean_of_ten_rounds_needs_thirty_rounds_as_in_the_report(cells, rounds, ours, words):
    rows = accuracies(*[0.9] * (rounds - 10), *[0.4] * 9, 0.5)
    node = {"overrides": [f"rounds={rounds}"], "setting": {}, "measure": "mean:test/acc[10]"}
    found, text = cells(Trainer(lambda values, number: rows), **node)
    assert found["FedAvg", "a (%)"][0] == ours
    assert f"Measure: {words}." in text


def test_a_personal_method_is_compared_by_its_result_or_not_at_all(cells):
    own = "personal/local_acc"

    def of(measured):
        def rows(values, number):
            columns = {own: [None, None, None, 0.8]} if values["algorithm"] in measured else {}
            return accuracies(0.1, 0.1, 0.1, 0.1, **columns)

        def result(values):
            return own if values["algorithm"] == "ditto" else "test/acc"

        return Trainer(rows, result=result)

    table = [("FedAvg", "fedavg"), ("Other", "other"), ("Ditto", "ditto")]
    rows = [{"label": label, "overrides": [f"algorithm={name}"]} for label, name in table]
    node = {"rows": rows, "cells": {}, "measure": "last:test/acc"}
    found, text = cells(of({"ditto"}), name="few", **node)
    equal = "10.00 (10.00 to 10.00)"
    assert [found[label, "a (%)"][0] for label, _ in table] == [equal, equal, "not compared"]
    assert f"Not compared: Ditto is judged by {own}, which FedAvg and Other did not measure" in text
    found, text = cells(of({"fedavg", "other", "ditto"}), name="all", **node)
    assert {cell[0] for cell in found.values()} == {"80.00 (80.00 to 80.00)"}
    node["measure"] = "rounds:0.5"  # short for a target of test/acc
    _, target = cells(of({"fedavg", "other", "ditto"}), name="target", **node)
    assert "Measure: rounds to accuracy of clients' own models 0.5 " in target
    assert f"Measure: accuracy of clients' own models (last:{own})." in text


OWN = {
    "overrides": ["data=digits", "rounds=4"],
    "columns": [{"label": "a"}],
    "rows": [
        {"label": "GC-Fed", "overrides": ["gc=gcfed"]},
        {"label": "FedAvg", "overrides": ["gc=none"]},
    ],
    "seeds": [3, 5, 8],
}


def own_table(cells, values, **node):
    """The cells and the page of a table without printed numbers.

    ``values``: the last test by kind of GC and seed.
    """
    blank = dict.fromkeys(("paper", "table", "title", "source", "unstated"), "")
    node = blank | {"setting": {}, "cells": {}, "measure": "mean:test/acc[10]"} | OWN | node

    def of(words, number):
        return values[words["gc"]][words["seed"]]

    return cells(Trainer(of), **node)


def test_an_own_table_has_intervals_and_differences_seed_by_seed_to_fedavg(cells):
    """Student's t with two degrees of freedom is 4.303 at 97.5 %."""
    values = {
        "gcfed": {"3": 0.6, "5": 0.62, "8": 0.64},
        "none": {"3": 0.5, "5": 0.53, "8": 0.53},
    }
    found, text = own_table(cells, values)
    # standard deviations 2 and 1.732; of the differences 10, 9 and 11: 1
    assert found["GC-Fed", "a (%)"][0] == "62.00 (57.03 to 66.97)"
    assert found["FedAvg", "a (%)"][0] == "52.00 (47.70 to 56.30)"
    assert found["GC-Fed", "a (%)"][2] == "+10.00 (7.52 to 12.48)"
    assert found["FedAvg", "a (%)"][2] == ""
    assert "Differences are to FedAvg, seed by seed, with their 95 % interval." in text
    assert "## toy (scale=full, 4 rounds)" in text
    assert "p: Welch" not in text


@pytest.mark.parametrize(("last", "mark"), [(0.64, "*"), (0.58, "")])
def test_differences_that_stand_after_holms_correction_have_a_mark(cells, last, mark):
    """Local GC's difference has p 0.038. GC-Fed's has 0.003, or 0.035: then no p is below 0.025."""
    rows = [*OWN["rows"], {"label": "Local", "overrides": ["gc=local"]}]
    values = {
        "gcfed": {"3": 0.6, "5": 0.62, "8": last},
        "none": {"3": 0.5, "5": 0.53, "8": 0.53},
        "local": {"3": 0.52, "5": 0.57, "8": 0.57},
    }
    found, text = own_table(cells, values, rows=rows)
    for row in ("GC-Fed", "Local"):
        assert found[row, "a (%)"][2].partition(")")[2] == mark
    meaning = "*: a difference that stands also" if mark else "No difference stands"
    assert f"{meaning} after Holm's correction (5 %) for the 2 differences of this table" in text


def test_holms_correction_counts_all_pairs_of_a_column_without_fedavg(cells):
    """Differences to the best row: Local's has p 0.057 and Other's 0.020, which is above 5 %/3."""
    rows = [
        OWN["rows"][0],
        {"label": "Local", "overrides": ["gc=local"]},
        {"label": "Other", "overrides": ["gc=none"]},
    ]
    values = {
        "gcfed": {"3": 0.5, "5": 0.6, "8": 0.7},
        "local": {"3": 0.48, "5": 0.55, "8": 0.65},
        "none": {"3": 0.46, "5": 0.55, "8": 0.67},
    }
    found, text = own_table(cells, values, rows=rows)
    assert found["Other", "a (%)"][2] == "-4.00 (-6.48 to -1.52)"
    assert "(5 %) for 3 pairs: all of a column whose best row is the reference" in text


def test_without_fedavg_differences_are_to_the_best_row(cells):
    rows = [OWN["rows"][0], {"label": "Other", "overrides": ["gc=none"]}]
    values = {"gcfed": {"3": 0.5, "5": 0.6}, "none": {"3": 0.7, "5": 0.7}}
    found, text = own_table(cells, values, rows=rows, seeds=[3, 5])
    assert found["GC-Fed", "a (%)"][2].startswith("-15.00 (")
    assert "Differences are to Other, seed by seed" in text
    losses = [{"test/loss": 0.2}] * 4

    def of(words, number):
        return losses if words["gc"] == "gcfed" else [{"test/loss": 0.3}] * 4

    found, text = cells(
        Trainer(of), name="loss", **OWN | {"rows": rows, "cells": {}, "measure": "last:test/loss"}
    )
    assert found["Other", "a"][2] == "+0.1 (0.1 to 0.1)"  # less is better, so GC-Fed is the best
    assert "Differences are to GC-Fed" in text


def test_the_best_row_reaches_a_target_first(cells):
    rows = [OWN["rows"][0], {"label": "Slow", "overrides": ["gc=none"]}]
    late = [{"test/acc": 0.1}] * 3 + [{"test/acc": 0.9}]
    early = [{"test/acc": 0.9}] * 4

    def of(words, number):
        return early if words["gc"] == "gcfed" else late

    node = OWN | {"rows": rows, "cells": {}, "measure": "rounds:test/acc>=0.8", "seeds": [3, 5]}
    found, text = cells(Trainer(of), name="target", **node)
    assert "Differences are to GC-Fed" in text
    assert found["Slow", "a"][2].startswith("+3 (")


def test_one_seed_has_neither_an_interval_nor_a_difference(cells):
    values = {"gcfed": {"3": 0.6}, "none": {"3": 0.5}}
    found, text = own_table(cells, values, seeds=[3])
    assert found["GC-Fed", "a (%)"] == ("60.00", "–", "")
    assert "Differences are to" not in text


def test_an_own_table_of_regressions_is_judged_by_their_error_in_its_unit(cells):
    def of(words, number):
        return [{"test/rmse": 2.0, "test/loss": 4.0}] * 4

    found, text = cells(Trainer(of), **OWN | {"cells": {}, "measure": RESULT})
    assert found["FedAvg", "a"][0] == "2 (2 to 2)"
    assert "Measure: RMSE (final:test/rmse)." in text
