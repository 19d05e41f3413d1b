"""Methods by measures, and the list of all runs."""

import pytest
from run_folders import GCFED, PLACE, run_of

from gcfed.report.groups import grouped
from gcfed.report.tables import Best, all_runs, measured, usual
from gcfed.runs.measures import MEASURES


def test_a_federation_is_a_table_of_methods_by_measures():
    same = {"client.optimizer.lr": 0.013725923743207623, "eval_every": 5}  # a search's best
    runs = [run_of(seed=s, values=(0.1, 0.4 + s / 10), **same) for s in (1, 2)]
    moon = {"tags.algorithm": "moon", "methods.moon._target_": "gcfed.methods.moon.MOON"}
    runs += [run_of(**GCFED, **same, values=(0.2, 0.9)), run_of("failed", values=(0.2,), **moon, **same)]
    table = measured(grouped(runs), ["last:test/acc", "max:test/acc", "max:test/nothing"], "f", "F")
    assert table.frame.to_dict("list") == {
        "method": ["fedavg", "gcfed", "moon"],
        "accuracy at the end (%)": ["55.00 (7.07)", "90.00 [1 of 2]", "failed at seed 1"],
        "best accuracy (%)": ["55.00 (7.07)", "90.00 [1 of 2]", "–"],
    }
    assert [isinstance(cell, Best) for cell in table.frame["best accuracy (%)"]] == [False, True, False]
    assert table.notes[0].endswith("All: η 0.0137, epochs 5, tested every 5 rounds.")
    assert f"moon ({PLACE}, 30 rounds): failed at seed 1" in table.notes[1]
    assert table.records["mean"].tolist() == pytest.approx([55, 90, 55, 90])
    assert measured(grouped(runs), ["max:test/nothing"], "f", "F") is None


def test_what_of_local_training_differs_between_methods_is_said_below_the_table():
    """A lead that comes of another learning rate must not look like a method's."""
    runs = [run_of(), run_of(**GCFED, **{"client.optimizer.lr": 0.1, "client.clip_norm": 10.0})]
    moon = {"tags.algorithm": "moon", "methods.moon._target_": "gcfed.methods.moon.MOON"}
    runs += [run_of(**moon)]
    assert measured(grouped(runs), ["last:test/acc"], "f", "F").notes[-2:] == [
        "Local training is not alike: η 0.01, but 0.1 (gcfed); clip norm none, but 10 (gcfed).",
        "In the mean, though stopped early: "
        + "; ".join(f"{name}, seed 1: 1 of 30 rounds" for name in ("fedavg", "gcfed", "moon")) + ".",
    ]  # fmt: skip
    alike = measured(grouped([run_of(rounds=1), run_of(rounds=1, **GCFED)]), ["last:test/acc"], "f", "F")
    assert len(alike.notes) == 1
    lam = [run_of(rounds=1, **GCFED, **{"client.optimizer.lr": lr}) for lr in (0.1, 0.2)]  # said by their names
    assert len(measured(grouped(lam), ["last:test/acc"], "f", "F").notes) == 1


def test_targets_that_any_run_reached_are_columns():
    summary = {"bytes_to_target": {"0.5": 3e6}}
    reached = run_of(values=(0.2, 0.6), targets=[0.5, 0.9], summary=summary)
    groups = grouped([reached, run_of(**GCFED, targets=[0.5], values=(0.2,))])
    assert usual(groups)[-2:] == ["rounds:test/acc>=0.5", "bytes_to_target/0.5"]
    table = measured(groups, usual(groups)[-2:], "t", "T")
    columns = {"method": ["fedavg", "gcfed"], "rounds to 50 %": ["2", "1+"], "bytes to 50 % (MB)": ["3", "–"]}
    assert table.frame.to_dict("list") == columns
    assert usual(groups[1:]) == [*MEASURES]


def test_every_run_is_listed_with_how_it_ended():
    runs = [run_of(folder="/a"), run_of("failed", folder="/b", seed=2), run_of("diverged", folder="/c", seed=3)]
    table = all_runs(runs, grouped(runs), {run: run.folder.name for run in runs})
    assert table.frame["state"].tolist() == ["failed", "diverged", "finished"]
    assert table.frame["rounds"].tolist() == ["1 of 30"] * 3
    assert table.frame["final"].tolist() == ["50.00%"] * 3
    assert "error" not in table.frame
