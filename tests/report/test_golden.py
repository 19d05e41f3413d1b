"""The numbers of a sample of runs are those that the report's first version gave, cell by cell."""

import re
from pathlib import Path

import pandas as pd
import pytest
from sample_runs import sample

from gcfed.report.groups import grouped
from gcfed.runs.folder import find_runs
from gcfed.runs.measures import sample as over_seeds
from gcfed.runs.measures import value


def golden(name):
    table = pd.read_csv(Path(__file__).parent / "golden" / f"{name}.csv", dtype={"seeds": str}, na_values=[""])
    return table.astype(object).where(table.notna(), None)


def near(number):
    return number if number is None else pytest.approx(number, rel=1e-9, abs=1e-12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return find_runs([sample(tmp_path_factory.mktemp("golden") / "logs")])


@pytest.fixture(scope="module")
def groups(runs):
    return grouped(runs)


def test_repetitions_are_found_and_their_measures_are_the_same(groups):
    by_name = {re.sub(r"_s\d+$", "", group.runs[0].folder.name): group for group in groups}
    for row in golden("measures").itertuples():
        s = over_seeds(by_name[row.runs].runs, row.measure)
        assert (s.mean, s.std, s.bound) == (near(row.mean), near(row.std), row.bound == "yes"), row
        assert " ".join(map(str, s.values)) == (row.seeds or ""), row


def test_how_each_run_ended_is_the_same(runs):
    by_name = {run.folder.name: run for run in runs}
    assert by_name.keys() == set(golden("runs")["folder"])
    for row in golden("runs").itertuples():
        run = by_name[row.folder]
        ending = (run.state, run.seed, run.rounds, run.planned, run.note)
        assert ending == (row.state, row.seed, row.rounds, row.planned, row.note or "")
        numbers = [value(run, measure) for measure in ("last:test/acc", "max:test/acc", "sum:time/round_s")]
        assert numbers == [near(row.final), near(row.best), near(row.seconds)], row
