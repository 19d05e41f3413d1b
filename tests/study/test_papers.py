"""The papers' tables: what is printed, and that the settings and commands beside it are those of our configs."""

import inspect
import itertools
import random

import pytest
import yaml
from conftest import composer
from hydra.utils import get_object
from omegaconf import OmegaConf

from gcfed.runs.measures import UNITS, parse
from gcfed.study.jobs import read_jobs
from gcfed.study.papers import Cell, load, names, table_of
from gcfed.utils.resolvers import ROOT

ABSENT, OF_ALL_NETWORKS = object(), {"model.start"}


@pytest.fixture(scope="module")
def tables():
    return [load(name) for name in names()]


def runnable(table):
    """Row, column, overrides of the cells that we can run."""
    cells = ((r, c, table.command_overrides(r, c)) for r, c in itertools.product(table.rows, table.columns))
    return [(row, column, overrides) for row, column, overrides in cells if overrides is not None]


def test_the_tables_of_the_four_papers_are_there(tables):
    wanted = {"GC-Fed": "2 4 5 6 7 8", "FedACG": "1a 1b 2 3 4 5 6 7 8", "FedGC": "1 2 3 4", "SSF": "2 3 4 5"}
    numbered = [t for t in tables if t.place.startswith("Table ")]
    assert {(t.paper, t.table) for t in numbered} == {(p, n) for p, ns in wanted.items() for n in ns.split()}
    assert {t.name for t in tables if t not in numbered} == {"gcfed_rounds"}  # of a paper's text
    for table in tables:
        assert table.source.endswith(table.place)
        if table in numbered:
            assert table.name == f"{table.paper.lower().replace('-', '')}_table{table.table}"
        assert (ROOT / "configs" / "study" / f"{table.name}.yaml").is_file()  # the command that a report names
        for axis in (*table.rows, *table.columns):
            assert axis.overrides is not None or axis.note, (table.name, axis.label)
        for row, column, _ in runnable(table):
            assert table.of("unit", row, column) in UNITS
            assert parse(table.of("measure", row, column))


def test_what_is_printed():
    assert load("gcfed_table5").cells["GC-Fed", "CIFAR-10, 5/100, α 0.05"] == Cell(66.47, 2.49)
    assert load("fedacg_table1a").cells["FedDecorr", "TinyImageNet, rounds to 35 %"] == Cell(1000, note="+")
    assert load("ssf_table4").cells["ν 2.0, high", "FedSub"] == Cell(note="diverged")


def test_what_a_row_says_wins_and_overrides_come_in_order():
    table, cifar10 = load("fedgc_table1"), 1
    rows = {axis.label: axis for axis in table.rows}
    for row, lr in (("FedAvg", 0.05), ("FedGC (with SGC)", 0.1)):
        assert table.settings(rows[row], table.columns[cifar10])["client.optimizer.lr"] == lr
    assert table.command_overrides(rows["#samples per client"], table.columns[cifar10]) is None
    table = load("ssf_table3")
    ssf = next(column for column in table.columns if column.label == "SSF")
    both = ("algorithm=ssf", "experiment=matrix_regression_ssf", "heterogeneity=high")
    assert table.command_overrides(table.rows[1], ssf) == (*both, "methods.ssf.ratio=0.05")
    table = load("fedacg_table1b")
    words = [[table.of(name, table.rows[0], table.columns[i]) for name in ("measure", "unit", "higher_is_better")]
             for i in (0, 2)]  # fmt: skip
    assert words == [["test/acc_ema@500", "percent", True], ["rounds:test/acc_ema>=0.73", "rounds", False]]


def test_no_two_cells_with_unlike_numbers_are_one_run(tables):
    for table in tables:
        runs = {}
        for row, column, overrides in runnable(table):
            run = (*sorted(dict(o.split("=", 1) for o in overrides).items()), table.of("measure", row, column))
            cell = table.cells[row.label, column.label]
            assert runs.setdefault(run, cell) == cell or row.by_column, (table.name, row.label, column.label)


def refused(node, place=""):
    """Keys of a composed config that the constructor beside them does not take."""
    if node.get("_target_"):
        known = inspect.signature(get_object(node["_target_"])).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            yield from (f"{place}{key}" for key in node if key not in known and not key.startswith("_"))
    for key, value in node.items():
        yield from refused(value, f"{place}{key}.") if isinstance(value, dict) else ()


def words_of(overrides):
    """The config files that they choose, a network also beside its experiment, and the keys that they set."""
    chosen = {o for o in overrides if o.lstrip("~").split("=")[0] in composer.groups}
    experiments, networks = ({o for o in chosen if o.startswith(kind)} for kind in ("experiment=", "model="))
    return chosen | {*itertools.product(experiments, networks)} | {o.split("=")[0] for o in {*overrides} - chosen}


@pytest.fixture(scope="module")
def seen():
    """The words of what has been composed, which Hydra takes long to do."""
    return set()


def test_the_listed_settings_are_those_of_our_configs(tables, seen):
    """Only where a paper's file says why not. Each algorithm, experiment and listed value is in a cell composed."""
    cells = []
    for table in tables:
        for row, column, overrides in runnable(table):
            listed = table.settings(row, column)
            words = {o for o in overrides if o.startswith(("algorithm=", "experiment="))}
            cells.append((words | {(key, repr(value)) for key, value in listed.items()}, table, overrides, listed))
    departed = {table.name: set() for table in tables}

    def compare(words, table, overrides, listed):
        seen.update(words | words_of(overrides))
        cfg = composer(overrides)
        assert {*refused(OmegaConf.to_container(cfg))} <= OF_ALL_NETWORKS
        ours = {key: OmegaConf.select(cfg, key, default=ABSENT) for key in listed}
        assert ABSENT not in ours.values(), (table.name, overrides)
        departed[table.name] |= {key for key in listed if ours[key] != listed[key]}

    left = set().union(*(words for words, *_ in cells))
    while left:
        cell = max(cells, key=lambda cell: len(cell[0] & left))
        left -= cell[0]
        compare(*cell)
    for cell in random.Random(1).sample(cells, len(cells)):  # for what departs in few of a table's cells
        _, table, _, listed = cell
        if (table.departures.keys() - departed[table.name]) & listed.keys():
            compare(*cell)
    assert departed == {table.name: {*table.departures} for table in tables}


def test_every_study_that_is_shipped_can_be_built(seen):
    """All that their jobs say is in one composed; ``model=cnn`` in place of a ResNet must leave no ``model.groups``."""
    jobs = []
    for path in (ROOT / "configs" / "study").glob("[!b]*.yaml"):
        node = yaml.safe_load(path.read_text())["study"]
        jobs += [(words_of(job.overrides), job) for scale in ("full", "small") for job in read_jobs(scale, node)[0]]
    left = set().union(*(words for words, _ in jobs)) - seen
    while left:
        words, job = max(jobs, key=lambda one: len(one[0] & left))
        left -= words
        cfg = OmegaConf.to_container(composer(job.overrides))
        assert {*refused(cfg)} <= OF_ALL_NETWORKS, (job.folder, job.overrides)


GOOD = {
    "name": "mine", "columns": [{"label": "a"}, {"label": "b"}],
    "rows": [{"label": "r", "by_column": {"b": {"overrides": ["seed=2"]}}}, {"label": "s", "overrides": None}],
    "cells": {"r": [1, [2.5, 0.5]], "s": [{"mean": 3, "note": "failed"}, "1000+"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"columns": [{"label": "a", "mach": {}}]}, "mach"),
        ({"columns": [{"label": "b"}] * 2}, r"each label must be there once: rows \['r', 's'\], columns \['b', 'b'\]"),
        ({"columns": [{"label": 0.1}]}, "label=0.1 must be text"),
        ({"columns": [{"label": "a"}, {"label": "c"}]}, "row r: by_column names no column: b"),
        ({"cells": {"r": [1], "s": []}}, "row r: give one entry for each of the 2 columns"),
        ({"cells": {"r": [1, [2.5]], "s": [1, 2]}}, r"row r, column b: \[2.5\] is no number"),
    ],
)
def test_errors_name_the_place(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        table_of(GOOD | wrong)


def test_errors_name_the_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("rows: 3")
    with pytest.raises(ValueError, match=r"mine\.yaml is no table of a paper"):
        load(tmp_path / "mine.yaml")
