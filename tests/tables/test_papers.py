"""The papers' tables: their printed numbers, and settings and overrides that exist
in our configs.
"""

import itertools

import pytest
import yaml
from conftest import composer
from omegaconf import OmegaConf

from gcfed.folders.measures import parse
from gcfed.tables import running
from gcfed.tables.plan import make_plan, measures_of_cells
from gcfed.tables.reading import CATALOG, load, names
from gcfed.tables.records import UNITS, Printed, Selection
from gcfed.tables.search import tune
from gcfed.utils.keys import GROUPS
from gcfed.utils.resolvers import ROOT

#: Tables that need the code of an optional package.
OPTIONAL = sorted((ROOT / "reproductions/tables").glob("*.yaml"))
TABLES = [*map(load, names()), *map(load, OPTIONAL)]
ABSENT = object()


@pytest.fixture(scope="module")
def tables():
    return [table for table in TABLES if table.cells]


def runnable(table):
    """(row, column, overrides) of each cell that we can run."""
    cells = (
        (r, c, table.overrides_of(r, c)) for r, c in itertools.product(table.rows, table.columns)
    )
    return [(row, column, overrides) for row, column, overrides in cells if overrides is not None]


def test_the_tables_of_the_four_papers_are_there(tables):
    wanted = {
        "GC-Fed": "2 4 5 6 7 8" if OPTIONAL else "2 4 5 6 7",
        "FedACG": "1a 1b 2 3 4 5 6 7 8",
        "FedGC": "1 2 3 4",
        "SSF": "2 3 4 5",
    }
    numbered = [t for t in tables if t.table.isalnum()]
    assert {(t.paper, t.table) for t in numbered} == {
        (p, n) for p, ns in wanted.items() for n in ns.split()
    }
    # from the text of a paper
    assert {t.name for t in tables if t not in numbered} == {"gcfed_rounds"}
    for table in tables:
        assert table.source.endswith(table.table)
        if table in numbered:
            assert table.name == f"{table.paper.lower().replace('-', '')}_table{table.table}"
        for axis in (*table.rows, *table.columns):
            assert axis.overrides is not None or axis.note, (table.name, axis.label)
        for row, column, _ in runnable(table):
            assert table.unit_of(row, column) in (None, *UNITS)
            assert parse(table.measure_of(row, column))


def printed(name, row, column):
    table = load(name)
    (row,) = [axis for axis in table.rows if axis.label == row]
    (column,) = [axis for axis in table.columns if axis.label == column]
    return table.printed(row, column)


def test_printed_numbers():
    assert printed("gcfed_table5", "GC-Fed", "CIFAR-10, 5/100, α 0.05") == Printed(66.47, 2.49)
    assert printed("fedacg_table1a", "FedDecorr", "TinyImageNet, rounds to 35 %") == Printed(
        1000, note="+"
    )
    assert printed("ssf_table4", "ν 2.0, high", "FedSub") == Printed(note="diverged")


def test_a_rows_settings_win_and_a_column_has_a_measure_and_a_unit():
    table = load("fedgc_table1")
    cifar10 = 1
    rows = {axis.label: axis for axis in table.rows}
    for row, lr in (("FedAvg", 0.05), ("FedGC (with SGC)", 0.1)):
        assert table.settings(rows[row], table.columns[cifar10])["client.optimizer.lr"] == lr
    table = load("fedacg_table1b")
    row = table.rows[0]
    accuracy = table.columns[0]
    assert table.measure_of(row, accuracy) == "test/acc_ema@500"
    assert table.unit_of(row, accuracy) == "percent"
    rounds = table.columns[2]
    assert table.measure_of(row, rounds) == "rounds:test/acc_ema>=0.73"
    assert table.unit_of(row, rounds) == "rounds"


def test_cells_with_different_numbers_are_different_runs(tables):
    for table in tables:
        runs = {}
        for row, column, overrides in runnable(table):
            run = (
                *sorted(dict(o.split("=", 1) for o in overrides).items()),
                table.measure_of(row, column),
            )
            cell = table.printed(row, column)
            assert runs.setdefault(run, cell) == cell or row.by_column, (
                table.name,
                row.label,
                column.label,
            )


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_each_cell_of_each_scale_can_be_built_and_writes_its_measure(table, tmp_path):
    """What ``gcfed-table <name> scale=… dry_run=true`` checks, without an estimate of the time."""
    for scale in {"full", *table.scales}:
        planned = make_plan(table, scale, Selection())
        works = [running.composed_work(job, tmp_path) for job in planned.first_jobs]
        running.check_cells(works, measures_of_cells(table, planned))
        if table.search:
            pytest.importorskip("optuna")
            tuned = tune(table.search, planned.jobs, tmp_path, dry_run=True, train=True)
            assert not tuned.lost


def test_every_table_can_be_composed_and_the_listed_settings_are_those_of_our_configs(tables):
    """The composed cells contain each listed value, each key, each experiment and each network.

    Our value may differ only if a table's ``departures`` give the reason.
    """
    cells = []  # what a cell covers, its table, its overrides and its listed settings
    for table in tables:
        for row, column, overrides in runnable(table):
            listed = table.settings(row, column)
            cells.append(
                ({(key, repr(value)) for key, value in listed.items()}, table, overrides, listed)
            )
    for name in names():
        assert f"gcfed-table {name}" in (CATALOG / f"{name}.yaml").read_text()
    for table in TABLES:
        for scale in {"full", "small", *table.scales}:
            planned = make_plan(table, scale, Selection())
            jobs = planned.jobs
            assert all(planned.without_run)  # cells without a run give a reason
            assert len({tuple(sorted(job.overrides)) for job in jobs.values()}) == len(jobs) > 0
            assert {folder for cell in planned.folders.values() for folder in cell} == {*jobs}
            for job in jobs.values():
                chosen = {
                    o if o.startswith(("experiment=", "model=")) else o.split("=")[0]
                    for o in job.overrides
                }
                cells.append((chosen, table, job.overrides, {}))

    groups = {}  # cells by their config files: Hydra composes new files slowly
    for cell in cells:
        groups.setdefault(tuple(o for o in cell[2] if o.split("=")[0] in GROUPS), []).append(cell)
    words = {files: set().union(*(cell[0] for cell in own)) for files, own in groups.items()}
    left = set().union(*words.values())
    while left:
        for shows, table, overrides, listed in groups[
            max(words, key=lambda files: len(words[files] & left))
        ]:
            if shows & left:
                left -= shows
                cfg = composer(overrides)
                ours = {key: OmegaConf.select(cfg, key, default=ABSENT) for key in listed}
                assert ABSENT not in ours.values(), (table.name, overrides)
                assert {key for key in listed if ours[key] != listed[key]} <= {*table.departures}, (
                    table.name
                )


GOOD = {
    "columns": [{"label": "a"}, {"label": "b"}],
    "rows": [
        {"label": "r", "by_column": {"b": {"overrides": ["seed=2"]}}},
        {"label": "s", "overrides": None},
    ],
    "cells": {"r": [1, [2.5, 0.5]], "s": [{"mean": 3, "note": "failed"}, "1000+"]},
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, ""),
        ({"columns": [{"label": "a", "mach": {}}]}, r"the key columns\.0\.mach is unknown"),
        (
            {"columns": [{"label": "b"}] * 2},
            r"each label must occur once: rows \['r', 's'\], columns \['b', 'b'\]",
        ),
        ({"cells": {"r": [1], "s": []}}, "row r: give one entry for each of the 2 columns"),
        ({"cells": {"r": [1, [2.5]], "s": [1, 2]}}, r"row r, column b: \[2.5\] is no number"),
        ({"budget": 3}, "the key budget is unknown"),
        ({"shared_setting": "nothing"}, "nothing.yaml"),
    ],
)
def test_errors_name_the_file_and_the_place(tmp_path, wrong, message):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(GOOD | wrong))
    if not message:
        table = load(path)
        assert table.printed(table.rows[0], table.columns[0]) == Printed(1)
        return
    with pytest.raises(ValueError, match=rf"mine\.yaml is no table: .*{message}"):
        load(path)
    with pytest.raises(FileNotFoundError, match=r"The package has .*gcfed_table5"):
        load("gcfed_table99")
