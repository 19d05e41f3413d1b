"""Searches in a report: all trials in one table, the best of each in bold."""

from pathlib import Path

from gcfed.report.tables import Best, Search, read_searches, trials_table

TRIALS = "number,state,value,seconds,folder,{}\n0,complete,0.5,2.0,0,0.1\n1,complete,0.7,1,1,0.3\n2,fail,,,,0.2\n"


def test_trials_stand_one_below_the_other(tmp_path):
    for place, key in (("a/mine", "gc.lam"), ("b/mine", "a.key"), ("empty", None)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "trials.csv").write_text(TRIALS.format(key) if key else "")
    (tmp_path / "a/mine/optimization_results.yaml").write_text("metric: last:test/loss\ndirection: minimize\n")
    lacks = []
    searches = read_searches([tmp_path], lacks)
    assert len(lacks) == 1
    assert "empty cannot be read: trials.csv: EmptyDataError: No columns" in lacks[0]
    assert [search[1:] for search in searches.values()] == [("last:test/loss", False), ("", None)]
    table = trials_table(searches)
    assert [Path(name).name for name in table.frame["search"]] == ["mine", "", ""] * 2
    assert table.frame.drop(columns="search").to_numpy().tolist() == [
        ["0", "complete", "0.5", "2", "0.1", "–"],
        ["1", "complete", "0.7", "1", "0.3", "–"],
        ["2", "fail", "–", "–", "0.2", "–"],
        ["0", "complete", "0.5", "2", "–", "0.1"],
        ["1", "complete", "0.7", "1", "–", "0.3"],
        ["2", "fail", "–", "–", "–", "0.2"],
    ]
    assert [isinstance(cell, Best) for cell in table.frame["value"]] == [True, False, False, False, False, False]
    assert len(table.records["search"].unique()) == 2
    assert trials_table({}) is None


def test_a_search_without_trials_is_a_line_less(tmp_path):
    (tmp_path / "trials.csv").write_text(TRIALS.format("gc.lam").partition("\n")[0] + "\n")
    searches = read_searches([tmp_path], [])
    assert [type(search) for search in searches.values()] == [Search]
    assert trials_table(searches) is None
