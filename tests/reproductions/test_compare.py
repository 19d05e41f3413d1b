"""A table compares its runs with the printed numbers: the measures of a run and
the text of a cell.
"""

import math

import pandas as pd
import pytest
from pretend import Trainer, go, plain
from run_folders import accuracies, run_of, write_run

from reproductions.compare import measured

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
ROWS = accuracies(0.1, 0.6, None, 0.5)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("max:test/acc", 0.6),
        ("last:test/acc", 0.5),
        ("mean:test/acc", 0.4),
        ("mean:test/acc[3]", 0.55),
        ("test/acc@3", 0.6),
        ("test/acc@4", 0.5),
        ("test/acc@9", None),
        ("rounds:test/acc>=0.55", 2),
        ("rounds:test/acc>=0.9", math.inf),
        ("rounds:test/rmse>=0.9", None),
        ("rounds:test/acc[2]>=0.35", 2),
        ("rounds:test/acc[2]>=0.36", 4),
        ("last:test/rmse", None),
        ("best_round", 2),
        ("client_seconds", 0.2),
        ("nothing", None),
    ],
)
def test_measures_of_a_run_have_the_values_computed_by_hand(tmp_path, measure, expected):
    """Rounds 1, 2 and 4 have tests.

    In round 4, the mean of two rounds has only the test of round 4.
    """
    assert measured(write_run(tmp_path, ROWS), measure) == (expected and pytest.approx(expected))


def test_an_unknown_measure_is_refused():
    with pytest.raises(ValueError, match=r"measure=most:test/acc must be max:test/acc"):
        measured(run_of(), "most:test/acc")


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """``cells(trainer, *words, **node)``: {(row, column): (ours, paper, difference)}, and the
    page's Markdown.
    """

    def made(trainer, *words, **node):
        plain.logs = tmp_path / "logs"
        go(monkeypatch, tmp_path, trainer, TOY | node, "columns=[a]", *words, name="toy")
        folder = tmp_path / "logs/study/toy/full"
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
    trainer, scales = Trainer(), {"full": {"overrides": ["model.hidden=[8]"]}}
    cells(trainer, "rows=[FedAvg]", scales=scales)
    (trainer.folders[1] / "summary.json").unlink()  # seed 2 has all rows, but has not ended
    found, text = cells(trainer, "compare=true", scales=scales)
    assert len(trainer.jobs) == 2
    assert found["FedAvg", "a (%)"][0] == "50.00 [1 of 2]"
    assert "## Toy, Table 1, Accuracies (scale=full model.hidden=[8])" in text
