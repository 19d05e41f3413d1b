"""The numbers of a sample of runs are those that the report's first version gave, cell by cell."""

import csv
import re
from pathlib import Path

import pytest
from sample_runs import sample

from gcfed.report.build import report
from gcfed.report.groups import grouped
from gcfed.report.groups import sample as over_seeds
from gcfed.runs.folder import find_runs
from gcfed.runs.measures import value

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> list[dict[str, str]]:
    with (GOLDEN / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str):
    return pytest.approx(float(text), rel=1e-9, abs=1e-12) if text else None


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    return sample(tmp_path_factory.mktemp("golden") / "logs")


@pytest.fixture(scope="module")
def groups(logs):
    return {re.sub(r"_s\d+$", "", group.runs[0].folder.name): group for group in grouped(find_runs([logs]))}


def test_repetitions_are_found_and_their_measures_are_the_same(groups):
    for row in golden("measures"):
        s = over_seeds(groups[row["runs"]], row["measure"])
        assert (s.mean, s.std) == (number(row["mean"]), number(row["std"])), row
        assert (" ".join(map(str, s.values)), "yes" if s.bound else "") == (row["seeds"], row["bound"]), row


def test_how_each_run_ended_is_the_same(logs):
    runs = {run.folder.name: run for run in find_runs([logs])}
    assert runs.keys() == {row["folder"] for row in golden("runs")}
    for row in golden("runs"):
        run = runs[row["folder"]]
        assert [run.state, str(run.seed), str(run.rounds), str(run.planned), run.note] == [
            row[name] for name in ("state", "seed", "rounds", "planned", "note")
        ]
        measures = {"final": "last:test/acc", "best": "max:test/acc", "seconds": "sum:time/round_s"}
        assert [value(run, m) for m in measures.values()] == [number(row[name]) for name in measures], row


def test_the_papers_cells_are_the_same(logs, tmp_path):
    cfg = {"roots": [str(logs)], "out": str(tmp_path / "out"), "papers": None, "measures": None}
    report(cfg | {"empty": False, "figures": False, "formats": []})
    found = {}
    for path in (tmp_path / "out" / "tables").glob("*_table*.csv"):
        with path.open(newline="") as file:
            found |= {(r["table"], r["row"], r["column"]): r for r in csv.DictReader(file) if r["mean"] or r["rounds"]}
    assert found.keys() == {(row["table"], row["row"], row["column"]) for row in golden("papers")}
    for row in golden("papers"):
        mine = found[row["table"], row["row"], row["column"]]
        for name in ("mean", "std", "paper_mean", "paper_std", "difference"):
            assert (float(mine[name]) if mine[name] else None) == number(row[name]), (name, row)
        assert (mine["seeds"], mine["bound"]) == (row["seeds"], row["bound"]), row
