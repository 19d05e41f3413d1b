"""The numbers of a sample of runs are those that the report's first version gave, cell by cell."""

import re
from pathlib import Path

import pandas as pd
import pytest
from sample_runs import sample

from gcfed.report.frame import frame_of
from gcfed.report.verdict import per_seed
from gcfed.runs.folder import find_runs
from gcfed.runs.measures import value


def golden(name):
    table = pd.read_csv(Path(__file__).parent / "golden" / f"{name}.csv", dtype={"seeds": str}, na_values=[""])
    return table.astype(object).where(table.notna(), None)


def near(number):
    return number if number is None else pytest.approx(number, rel=1e-9, abs=1e-12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return find_runs([sample(tmp_path_factory.mktemp("golden") / "logs")])


def test_repetitions_are_found_and_their_measures_are_the_same(runs):
    frame = frame_of(runs)
    settings = {re.sub(r"_s\d+$", "", rows["run"].iloc[0].folder.name): rows for _, rows in frame.groupby("setting")}
    for row in golden("measures").itertuples():
        values = per_seed(settings[row.runs], row.measure).iloc[:, 0]
        std = values.std() if len(values) > 1 else None
        if row.std is not None or len(values) == 1:  # rounds to a target that was not reached had no deviation
            assert std == near(row.std), row
        assert values.mean() == near(row.mean), row
        assert " ".join(map(str, values.index)) == (row.seeds or ""), row


def test_how_each_run_ended_is_the_same(runs):
    by_name = {run.folder.name: run for run in runs}
    assert by_name.keys() == set(golden("runs")["folder"])
    for row in golden("runs").itertuples():
        run = by_name[row.folder]
        ending = (run.state, run.seed, run.rounds, run.planned, run.note)
        assert ending == (row.state, row.seed, row.rounds, row.planned, row.note or "")
        numbers = [value(run, measure) for measure in ("final:test/acc", "best:test/acc", "total:time/round_s")]
        assert numbers == [near(row.final), near(row.best), near(row.seconds)], row
