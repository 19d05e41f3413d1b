"""Tables of any runs by method and federation, the list of all runs, and searches."""

import math

import pytest
from run_folders import rows_of, write_run

from gcfed.report.groups import grouped
from gcfed.report.lines import search_lines
from gcfed.report.overview import _described, all_runs, by_measure, unmeasured
from gcfed.report.runs import find_runs
from gcfed.report.searches import Trial, find_searches


def write(folder, name, accuracies, **config):
    kw = {key: config.pop(key) for key in ("failure", "summary", "rows") if key in config}
    config = {key.replace("__", "."): value for key, value in config.items()}
    rows = kw.pop("rows", None) or rows_of(accuracies)
    return write_run(folder / name, config={"targets": [0.5, 0.9], **config}, rows=rows, **kw)


def texts(table):
    return [[cell.text for cell in row.cells] for row in table.rows]


def test_one_federation_is_one_table_with_a_column_a_measure(tmp_path):
    write(tmp_path, "a1", [0.2, 0.6, 0.4], seed=1)
    write(tmp_path, "a2", [0.4, 0.6, 0.5], seed=2)
    write(tmp_path, "b1", [0.2, 0.3, 0.3], tags__algorithm="fedprox")
    write(tmp_path, "b2", [0.2], tags__algorithm="fedprox", seed=2, rounds=3, failure="OSError: disk full")
    groups = grouped(find_runs([tmp_path]))
    (table,) = by_measure(groups)
    assert table.header == (
        "", "Test accuracy, mean over the last 10 rounds (%)", "Best test accuracy (%)", "Test accuracy at the end (%)",
        "Rounds to 50 %", "Sent to the clients (GB)", "Sent by the clients (GB)", "Median time of a round (s)",
    )  # fmt: skip
    assert texts(table) == [
        ["FedAvg", "45.00 (7.07)", "60.00 (0.00)", "45.00 (7.07)", "2 (0)", "1.5e-05 (0)", "1.5e-05 (0)", "2 (0)"],
        ["FedProx", "26.67 [1]", "30.00 [1]", "30.00 [1]", "3+ [1]", "1.5e-05 [1]", "1.5e-05 [1]", "2 [1]"],
    ]
    assert [cell.bold for cell in table.rows[0].cells] == [False, True, True, True, False, False, False, False]
    assert table.rows[1].cells[1].title == (
        "mean of 3 tests; seed 1: 26.67; seed 2: failed after round 1 of 3: OSError: disk full"
    )
    assert table.rows[0].cells[2].title == "seed 1: 60.00; seed 2: 60.00"
    assert "1 failed or unfinished run is in no mean" in table.notes[0]
    assert len(table.records) == 2 * 7


def test_several_federations_are_a_table_a_measure(tmp_path):
    write(tmp_path, "a", [0.2, 0.6])
    write(tmp_path, "b", [0.2, 0.7], partition__alpha=1.0)
    write(tmp_path, "c", [0.2, 0.8], tags__gc="gcfed")
    write(tmp_path, "d", [0.9], tags__gc="gcfed", partition__alpha=1.0, rounds=2, summary=False)
    groups = grouped(find_runs([tmp_path]))
    table = by_measure(groups, ["max:test/acc"])[0]
    assert (table.name, table.header) == ("max_test_acc", ("", "α 0.1", "α 1"))
    assert texts(table) == [["FedAvg", "60.00", "70.00"], ["GC-Fed", "80.00", "unfinished"]]
    assert [[(cell.bold, cell.underline, cell.state) for cell in row.cells[1:]] for row in table.rows] == [
        [(False, True, ""), (False, False, "")],
        [(True, False, ""), (False, False, "unfinished")],
    ]
    names = [table.name for table in by_measure(groups)]
    assert names == ["mean_test_acc_10", "max_test_acc", "last_test_acc", "rounds_test_acc_0.5", "sum_comm_down_bytes",
                     "sum_comm_up_bytes", "time_round_s"]  # fmt: skip


def test_a_diverged_run_is_in_the_mean_and_marked(tmp_path):
    write(tmp_path, "a1", [], rows=[{"test/acc": 0.1, "test/loss": math.inf}])
    write(tmp_path, "a2", [0.5], seed=2)
    (table,) = by_measure(grouped(find_runs([tmp_path])), ["last:test/acc", "last:test/loss"])
    assert [(cell.text, cell.state) for cell in table.rows[0].cells[1:]] == [
        ("30.00 (28.28) †", "diverged"),
        ("1.5 [1] †", "diverged"),
    ]
    assert "†: a run diverged; it is in the mean unless its value is not finite." in table.notes[0]


def test_a_seed_that_went_nan_is_told_and_a_bound_has_no_deviation(tmp_path):
    write(tmp_path, "a1", [], rows=rows_of([0.5, 0.1], **{"test/loss": [1.0, math.nan]}))
    write(tmp_path, "a2", [0.2, 0.5], seed=2)
    write(tmp_path, "b", [], rows=rows_of([0.5, 0.1], **{"test/loss": [1.0, math.nan]}), tags__gc="gcfed")
    (table,) = by_measure(grouped(find_runs([tmp_path])), ["last:test/loss", "rounds:test/acc>=0.6"])
    assert texts(table) == [["FedAvg", "1.5 [1] †", "2+ †"], ["GC-Fed", "diverged", "2+ [1] †"]]
    assert table.notes[1].startswith("+: a run that did not reach the target counts with all its rounds")
    assert [record["std"] for record in table.records] == [None] * 4


def test_measures_that_were_asked_for(tmp_path):
    write(tmp_path, "a", [0.2, 0.6])
    groups = grouped(find_runs([tmp_path]))
    (table,) = by_measure(groups, ["rounds:test/acc>=0.55", "rounds:test/loss>=2", "acc_diff/min", "last:time/train_s"])
    assert table.header == (
        "", "Rounds to 55 %", "Rounds to 2 by test/loss", "acc_diff/min (%)", "last:time/train_s (s)",
    )  # fmt: skip
    asked = ["max:test/acc", "last:nothing", "none", "rounds:test/acc>=0.9", "rounds:test/error<=0.1"]
    assert [table.header[1:] for table in by_measure(groups, asked)] == [("Best test accuracy (%)", "Rounds to 90 %")]
    (told,) = unmeasured(groups[0].runs, asked)
    assert told.startswith("measures: no run has last:nothing, none, rounds:test/error<=0.1. There are")
    assert unmeasured(groups[0].runs, asked[:1]) == ()
    with pytest.raises(ValueError, match="'median:test/acc' is not understood"):
        by_measure(groups, ["median:test/acc"])
    assert by_measure([]) == []


def test_a_regression_has_its_error(tmp_path):
    rows = [{"test/loss": 2.0, "test/relative_error": 0.5}, {"test/loss": 1.0, "test/relative_error": 0.25}]
    write(tmp_path, "a", [], rows=rows)
    runs = find_runs([tmp_path])
    (table,) = by_measure(grouped(runs))
    assert table.header[1:3] == ("Relative error at the end", "Test loss at the end")
    assert texts(table)[0][1:3] == ["0.25", "1"]
    assert texts(all_runs(runs, grouped(runs), str))[0][5:7] == ["1", "1"]


def test_all_runs_are_listed_those_in_trouble_first(tmp_path):
    write(tmp_path, "a", [0.2, 0.6, 0.5])
    write(tmp_path, "b", [0.2], rounds=3, summary=False, seed=2)
    write(tmp_path, "c", [0.2], rounds=3, failure="OSError: disk full", seed=3)
    write(tmp_path, "d", [], rows=[{"test/acc": 0.1, "test/loss": math.inf}], rounds=1)
    write(tmp_path, "e", [0.1])
    (tmp_path / "e" / "config.yaml").write_text("{")
    runs = find_runs([tmp_path])
    table = all_runs(runs, grouped(runs), lambda run: run.folder.name)
    assert [row[0] for row in texts(table)] == ["failed", "failed", "diverged", "unfinished", "finished"]
    assert [row.cells[0].state for row in table.rows] == ["failed", "failed", "diverged", "unfinished", ""]
    assert texts(table)[0] == [
        "failed", "FedAvg", "digits, MLP, 5/20, α 0.1", "3", "1 of 3", "20.00%", "20.00%", "2", "c",
        "after round 1 of 3: OSError: disk full",
    ]  # fmt: skip
    assert texts(table)[1][:5] == ["failed", "?", "?", "–", "0 of –"]
    assert texts(table)[4][3:9] == ["1", "3 of 3", "50.00%", "60.00%", "6", "a"]
    assert table.notes[0].startswith("5 runs: 1 finished, 1 unfinished, 1 diverged, 2 failed.")


def test_searches(tmp_path):
    folder = tmp_path / "logs" / "my_search"
    folder.mkdir(parents=True)
    (folder / "trials.csv").write_text(
        "number,state,value,seconds,folder,gc.lam,client.optimizer.lr\n"
        "1,PRUNED,,3.5,1,0.9,\n"
        "0,COMPLETE,0.81,12,0,0.5,0.01\n"
        "2,FAIL,nan,,,,\n"
    )
    write(tmp_path / "logs", "a", [0.5])
    (tmp_path / "logs" / "a" / "trials.csv").write_text("a run's own\n")
    (search,) = find_searches([tmp_path, folder])
    assert (search.name, search.best, [end[0] for end in search_lines(search)["ends"]]) == (
        "my_search", None, ["highest", "lowest"],
    )  # fmt: skip
    (folder / "optimization_results.yaml").write_text("best_trial: 0\nbest_value: 0.81\n")
    (search,) = find_searches([tmp_path])
    assert search_lines(search)["ends"] == [("best", 0, 0.81)]  # which the search's direction decides
    assert search.trials == (
        Trial(0, "COMPLETE", 0.81, 12.0, "0", {"gc.lam": "0.5", "client.optimizer.lr": "0.01"}),
        Trial(1, "PRUNED", None, 3.5, "1", {"gc.lam": "0.9"}),
        Trial(2, "FAIL", None, None, "", {}),
    )
    (folder / "trials.csv").write_text("number,state\n1,x\n")
    with pytest.raises(ValueError, match=r"trials\.csv is no list of trials"):
        find_searches([tmp_path])


@pytest.mark.parametrize(
    ("measure", "unit", "higher"),
    [
        ("test/acc_smooth10", "percent", True),
        ("max:test/acc_smooth10", "percent", True),
        ("mean:test/acc[5]", "percent", True),
        ("test/acc_ema@500", "percent", True),
        ("acc_diff/std", "percent", None),
        ("client_seconds", "seconds", False),
        ("client_seconds_to_target/0.8", "seconds", False),
        ("mean:time/train_s", "seconds", False),
        ("bytes_to_target/0.8", "GB", False),
        ("min:test/loss", "none", False),
        ("last:gap/l2", "none", None),
    ],
)
def test_a_measure_of_ones_own_has_the_unit_of_its_column(measure, unit, higher):
    described = _described(measure)
    assert (described.unit, described.higher_is_better) == (unit, higher)
