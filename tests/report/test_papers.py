"""The papers' tables: what is printed, and that the settings and commands beside it are those of our configs."""

import functools
import itertools

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from gcfed.report.measures import value
from gcfed.report.papers import Axis, Cell, PaperTable, load, names
from gcfed.report.runs import Run
from gcfed.report.summary import summary_of
from gcfed.utils.resolvers import ROOT

TAGS = {group: f"tags.{group}" for group in ("algorithm", "gc", "model", "data")}  # what choosing an option sets
ABSENT = object()
parsed = functools.cache(yaml.safe_load)


@pytest.fixture(scope="module")
def tables() -> list[PaperTable]:
    return [load(name) for name in names()]


def runnable(table: PaperTable):
    """Row, column, overrides of the cells that we can run."""
    for row, column in itertools.product(table.rows, table.columns):
        overrides = table.command_overrides(row, column)
        if overrides is not None:
            yield row, column, overrides


def axis(axes: tuple[Axis, ...], label: str) -> Axis:
    return next(axis for axis in axes if axis.label == label)


@pytest.fixture
def composed():
    """The config of a command. Groups are composed once; values are put into a copy, as Hydra puts them."""
    base = functools.cache(lambda groups: compose("train", [*groups]))

    def make(overrides: tuple[str, ...]) -> DictConfig:
        groups = tuple(o for o in overrides if (ROOT / "configs" / o.split("=")[0]).is_dir())
        cfg = base(groups).copy()
        for override in overrides:
            if override not in groups:
                key, value = override.split("=")
                OmegaConf.update(cfg, key, parsed(value))  # an unknown key is an error
        return cfg

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        yield make


def test_the_tables_of_the_issue_are_there(tables):
    wanted = {"GC-Fed": "2 4 5 6 7 8", "FedACG": "1a 1b 2 3 4 5 6 7 8", "FedGC": "1 2 3 4", "SSF": "2 3 4 5"}
    assert {(t.paper, t.table) for t in tables} == {(p, n) for p, ns in wanted.items() for n in ns.split()}
    for table in tables:
        assert table.name == f"{table.paper.lower().replace('-', '')}_table{table.table}"
        assert table.source.endswith(f"Table {table.table}")
        assert all(cell.std is None for cell in table.cells.values()) == (table.deviation is None), table.name


@pytest.mark.parametrize(
    ("name", "row", "column", "cell"),
    [
        ("gcfed_table2", "Local GC", "Min", Cell(-20.1)),
        ("gcfed_table2", "Global GC", "Performance", Cell(note="Medium")),
        ("gcfed_table4", "FedDyn", "α 1000, 10/100", Cell(80.28, 0.01)),
        ("gcfed_table5", "GC-Fed", "CIFAR-10, 5/100, α 0.05", Cell(66.47, 2.49)),
        ("gcfed_table5", "Global GC", "CIFAR-10, 5/100, α 0.05", Cell(10.0, note="failed")),
        ("gcfed_table5", "FedVARP", "CIFAR-10, 5/200, α 0.05", Cell(49.66, 7.12)),
        ("gcfed_table6", "VGG11 FedVARP", "CIFAR-100, 5/400, α 0.05", Cell(note="N/A")),
        ("gcfed_table6", "ResNet18 GC-Fed", "TinyImageNet, 5/1000, α 0.1", Cell(29.45, 0.32)),
        ("gcfed_table7", "FedLC (with GC-Fed)", "5/400, α 0.05", Cell(39.91, 1.61)),
        ("gcfed_table8", "[C_out, 1, 1, 1]", "α 0.1", Cell(61.50, 1.29)),
        ("fedacg_table1a", "FedACG", "CIFAR-100, rounds to 55 %", Cell(409)),
        ("fedacg_table1a", "FedDecorr", "TinyImageNet, rounds to 35 %", Cell(1000, note="+")),
        ("fedacg_table1b", "FedDC", "CIFAR-10, 1000R", Cell(83.49)),
        ("fedacg_table2", "FedACG", "CIFAR-100, 5/500, 1000R", Cell(45.18)),
        ("fedacg_table3", "FedDyn", "rounds to 38 %", Cell(941)),
        ("fedacg_table4", "all three: FedACG", "CIFAR-100", Cell(48.40)),
        ("fedacg_table5", "i.i.d.", "β 1", Cell(85.92)),
        ("fedacg_table6", "FedACG + FedPAQ", "5/100, 1000R", Cell(50.53)),
        ("fedacg_table7", "FedADAM", "CelebA, rounds to 88 %", Cell(500, note="+")),
        ("fedacg_table8", "FedCM", "500R", Cell()),
        ("fedgc_table1", "FedCurv", "CIFAR100-100", Cell(9.48, note="failed")),
        ("fedgc_table2", "FedReg", "HWDigits-40, time", Cell(274.72)),
        ("fedgc_table2", "FedCurv", "CIFAR10-10, comm. cost", Cell(490, note="×2.5|θ|")),
        ("fedgc_table3", "FedAvg", "B = 20", Cell(93.43)),
        ("fedgc_table4", "FedGC", "HWDigits-4", Cell(95.37)),
        ("ssf_table2", "ν 0.1, low", "FedSub", Cell(11.295)),
        ("ssf_table3", "r/d 0.01, r 1", "SSF", Cell(282)),
        ("ssf_table4", "ν 2.0, high", "FedSub", Cell(note="diverged")),
        ("ssf_table5", "SSF", "Best epoch", Cell(99)),
    ],
)
def test_what_is_printed(name, row, column, cell):
    assert load(name).cells[row, column] == cell


def test_measures_and_units_of_columns(tables):
    table = load("fedacg_table1b")
    row, acc, rounds = table.rows[0], table.columns[0], table.columns[2]
    assert [table.measure_of(row, c) for c in (acc, rounds)] == ["test/acc_ema@500", "rounds:test/acc_ema>=0.73"]
    assert [table.unit_of(row, c) for c in (acc, rounds)] == ["percent", "rounds"]
    assert [table.higher_is_better_of(row, c) for c in (acc, rounds)] == [True, False]
    for table in tables:
        for row, column, _ in runnable(table):
            assert table.unit_of(row, column) in ("percent", "rounds", "seconds", "1e-3")
        for one in (*table.rows, *table.columns):
            assert one.overrides is not None or one.note, (table.name, one.label)


def test_every_measure_is_found_in_a_run(tables, tmp_path):
    names = ("test/acc", "test/acc_ema", "test/relative_error", "test/loss", "comm/up_bytes", "comm/down_bytes")
    names += ("time/train_s", "time/round_s", "train/clients", "train/nonfinite_clients")
    columns = {"round": np.arange(1.0, 1001)} | dict.fromkeys(names, np.linspace(0.01, 1, 1000))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    run = Run(tmp_path, {}, (), summary_of(rows, ()), columns, "finished", "")
    for table in tables:
        for row, column, _ in runnable(table):
            measure = table.measure_of(row, column)
            assert measure, (table.name, column.label)
            assert value(run, measure) is not None, measure


def test_what_a_row_says_wins_and_overrides_come_in_order():
    table = load("fedgc_table1")
    column = axis(table.columns, "CIFAR10-10")
    fedavg, fedgc = axis(table.rows, "FedAvg"), axis(table.rows, "FedGC (with SGC)")
    assert [table.settings(row, column)["client.optimizer.lr"] for row in (fedavg, fedgc)] == [0.05, 0.1]
    assert table.settings(fedgc, column)["client.steps"] == 1
    assert table.match(fedavg, column) == {
        "tags.gc": "none", "quantization._target_": None, "tags.data": "cifar10", "partition.classes": 1,
        "tags.algorithm": "fedavg",
    }  # fmt: skip
    assert table.command_overrides(axis(table.rows, "#samples per client"), column) is None
    table = load("ssf_table3")
    row = axis(table.rows, "r/d 0.05, r 5")
    full, ssf = axis(table.columns, "Full-SCAFFOLD"), axis(table.columns, "SSF")
    both = ("experiment=matrix_regression_ssf", "heterogeneity=high")
    assert table.command_overrides(row, full) == ("algorithm=scaffold", *both)
    assert table.command_overrides(row, ssf) == ("algorithm=ssf", *both, "methods.ssf.ratio=0.05")
    assert table.match(row, ssf)["methods.ssf.ratio"] == 0.05
    assert "methods.ssf.ratio" not in table.match(row, full)


def said_and_made(table: PaperTable, row: Axis, column: Axis, overrides: tuple[str, ...]) -> set[str]:
    """The keys that the text of a cell's command sets to something else than its match and setting say."""
    made = dict(override.split("=") for override in overrides)
    made = {TAGS.get(key, key): parsed(value) for key, value in made.items()}
    said = table.settings(row, column) | table.match(row, column)
    return {key for key in made.keys() & said.keys() if made[key] != said[key]}


def test_no_two_cells_are_the_same_run(tables):
    for table in tables:
        runs: dict[tuple, Cell] = {}
        for row, column, overrides in runnable(table):
            place = (table.name, row.label, column.label)
            assert said_and_made(table, row, column, overrides) <= table.departures.keys(), place
            run = (*sorted(table.match(row, column).items()), table.measure_of(row, column))
            cell = table.cells[row.label, column.label]
            assert runs.setdefault(run, cell) == cell or row.by_column, place  # SSF printed full methods at every r/d


def test_settings_and_commands_are_those_of_our_configs(tables, composed):
    """So many cells are composed that each row's and column's overrides, keys and values are among them.

    Rows that differ by network or GC alone count as one.
    """
    seen: set = set()
    for table in tables:
        departed = set()
        for row, column, overrides in runnable(table):
            match, setting = table.match(row, column), table.settings(row, column)
            departed |= said_and_made(table, row, column, overrides)
            method = [o for o in row.overrides if not o.startswith(("model=", "gc="))]
            news = {(table.paper, *method), (table.paper, *column.overrides, *table.overrides), *overrides}
            news |= {*match.items(), *setting.items()}
            news |= {(table.name, column.label, key) for key in table.departures.keys() & setting.keys()}
            if news <= seen:
                continue
            seen |= news
            cfg = composed(overrides)
            place = (table.name, row.label, column.label)
            assert {key: OmegaConf.select(cfg, key, default=ABSENT) for key in match} == match, place
            ours = {key: OmegaConf.select(cfg, key, default=ABSENT) for key in setting}
            assert [key for key in setting if ours[key] is ABSENT] == [], place
            departed |= {key for key in setting if ours[key] != setting[key]}
        assert departed == table.departures.keys(), table.name


GOOD = """
paper: P
table: "1"
title: T
source: P, Table 1
unit: percent
deviation: std
columns:
  - {label: a}
  - {label: b}
rows:
  - {label: r, by_column: {b: {match: {seed: 2}}}}
  - {label: s, overrides: null}
cells:
  r: [1, [2.5, 0.5]]
  s: [{mean: 3, note: failed}, 1000+]
"""


def test_a_table_from_a_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    table = load(path)
    assert (table.name, table.paper, table.seeds, table.measure) == ("mine", "P", None, None)
    expected = [Cell(1.0), Cell(2.5, 0.5), Cell(3.0, note="failed"), Cell(1000.0, note="+")]
    assert list(table.cells.values()) == expected
    assert [table.match(table.rows[0], column) for column in table.columns] == [{}, {"seed": 2}]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("paper: P\n", "", "mine.yaml: missing keys: paper"),
        ("unit: percent", "unit: percent\nunits: x", "mine.yaml: unknown keys: units"),
        ("{label: a}", "{label: a, mach: {}}", "a column a: unknown keys: mach"),
        ("{label: a}", "{label: b}", "mine.yaml: the label b is there twice"),
        ("{label: a}", "{label: 0.1}", "a column 0.1: a label must be a text"),
        ("{label: a}", "a", "a column: a is no mapping"),
        ("{label: s, overrides: null}", "{overrides: null}", "a row: missing keys: label"),
        ("{b: {match", "{c: {match", "row r: by_column names no column: c"),
        ("[1, [2.5, 0.5]]", "[1]", "row r: give one entry for each of the 2 columns"),
        ("[1, [2.5, 0.5]]", "[1, [2.5]]", r"row r, column b: \[2.5\] is no number"),
        ("[1, [2.5, 0.5]]", "[true, 2]", "row r, column a: True is no number"),
        ("{mean: 3, note: failed}", "{mean: x}", "row s, column a"),
        ("  s: [{", "  t: [{", "mine.yaml: rows and cells differ in s, t"),
        ("cells:", "cells: 1\nnote:", "cells a mapping"),
        ("deviation: std", "deviation: confidence", "so say deviation: std; differences are given in units of it"),
    ],
)
def test_errors_name_the_file_and_the_row(old, new, message, tmp_path):
    assert GOOD.count(old) == 1
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "mine.yaml" in str(error.value)


def test_a_wrong_name_lists_the_tables():
    with pytest.raises(FileNotFoundError, match=r"gcfed_table3.*fedacg_table1a, .*ssf_table5"):
        load("gcfed_table3")
