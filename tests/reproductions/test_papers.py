"""The papers' tables: what is printed, and that the settings and commands beside it are those of our configs."""

import inspect
import itertools

import pytest
import yaml
from conftest import composer
from hydra.utils import get_object
from omegaconf import OmegaConf

from gcfed.utils.compose import GROUPS
from reproductions.compare import FORMS, UNITS
from reproductions.tables import CONFIGS, Cell, Part, load, plan

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
ABSENT = object()


@pytest.fixture(scope="module")
def tables():
    return [table for table in map(load, NAMES) if table.cells]


def runnable(table):
    """Row, column, overrides of the cells that we can run."""
    cells = ((r, c, table.overrides_of(r, c)) for r, c in itertools.product(table.rows, table.columns))
    return [(row, column, overrides) for row, column, overrides in cells if overrides is not None]


def test_the_tables_of_the_four_papers_are_there(tables):
    wanted = {"GC-Fed": "2 4 5 6 7 8", "FedACG": "1a 1b 2 3 4 5 6 7 8", "FedGC": "1 2 3 4", "SSF": "2 3 4 5"}
    numbered = [t for t in tables if t.table.isalnum()]
    assert {(t.paper, t.table) for t in numbered} == {(p, n) for p, ns in wanted.items() for n in ns.split()}
    assert {t.name for t in tables if t not in numbered} == {"gcfed_rounds"}  # of a paper's text
    for table in tables:
        assert table.source.endswith(table.table)
        if table in numbered:
            assert table.name == f"{table.paper.lower().replace('-', '')}_table{table.table}"
        for axis in (*table.rows, *table.columns):
            assert axis.overrides is not None or axis.note, (table.name, axis.label)
        for row, column, _ in runnable(table):
            assert table.of("unit", row, column) in UNITS
            assert any(form.fullmatch(table.of("measure", row, column)) for form in FORMS)


def printed(name, row, column):
    table = load(name)
    (row,) = [axis for axis in table.rows if axis.label == row]
    (column,) = [axis for axis in table.columns if axis.label == column]
    return table.cell(row, column)


def test_what_is_printed():
    assert printed("gcfed_table5", "GC-Fed", "CIFAR-10, 5/100, α 0.05") == Cell(66.47, 2.49)
    assert printed("fedacg_table1a", "FedDecorr", "TinyImageNet, rounds to 35 %") == Cell(1000, note="+")
    assert printed("ssf_table4", "ν 2.0, high", "FedSub") == Cell(note="diverged")


def test_the_six_targets_of_gcfeds_figure_6():
    """Section 4.2.4, copied from its text."""
    for column, rounds in {
        "CIFAR-10, 5/100, α 0.1, 60 %": {"GC-Fed": 182, "Local GC": 244, "Global GC": 322, "FedAvg": 598},
        "CIFAR-100, VGG11, 5/400, α 0.1, 30 %": {"GC-Fed": 309, "Local GC": 332, "Global GC": 421, "FedAvg": 676},
        "TinyImageNet, ResNet18, 5/500, α 0.1, 20 %": {
            "GC-Fed": 236, "Local GC": 257, "Global GC": 486, "FedAvg": 781,
        },
        "CIFAR-10, 5/200, α 0.1, 55 %": {"GC-Fed": 184, "FedAvg": 584},
        "CIFAR-100, VGG11, 5/800, α 0.1, 25 %": {"GC-Fed": 385, "FedAvg": 773},
        "TinyImageNet, ResNet18, 5/1000, α 0.1, 15 %": {"GC-Fed": 316, "FedAvg": 943},
    }.items():  # fmt: skip
        assert {row: printed("gcfed_rounds", row, column).mean for row in rounds} == rounds


def test_what_a_row_says_wins_and_overrides_come_in_order():
    table, cifar10 = load("fedgc_table1"), 1
    rows = {axis.label: axis for axis in table.rows}
    for row, lr in (("FedAvg", 0.05), ("FedGC (with SGC)", 0.1)):
        assert table.settings(rows[row], table.columns[cifar10])["client.optimizer.lr"] == lr
    assert table.overrides_of(rows["#samples per client"], table.columns[cifar10]) is None
    table = load("ssf_table3")
    ssf = next(column for column in table.columns if column.label == "SSF")
    both = ["algorithm=ssf", "experiment=matrix_regression_ssf", "heterogeneity=high"]
    assert table.overrides_of(table.rows[1], ssf) == [*both, "methods.ssf.ratio=0.05"]
    table = load("fedacg_table1b")
    words = [[table.of(name, table.rows[0], table.columns[i]) for name in ("measure", "unit")] for i in (0, 2)]
    assert words == [["test/acc_ema@500", "percent"], ["rounds:test/acc_ema>=0.73", "rounds"]]


def test_no_two_cells_with_unlike_numbers_are_one_run(tables):
    for table in tables:
        runs = {}
        for row, column, overrides in runnable(table):
            run = (*sorted(dict(o.split("=", 1) for o in overrides).items()), table.of("measure", row, column))
            cell = table.cell(row, column)
            assert runs.setdefault(run, cell) == cell or row.by_column, (table.name, row.label, column.label)


def test_the_opponents_of_fedgc_have_the_constants_of_fedregs_code_for_one_class_a_client():
    table = load("fedgc_table1")
    rows = {axis.label: axis for axis in table.rows}
    for column, lam, fedreg in (("HWDigits-40", 1e-4, (0.3, 0.2, 0.002)), ("CIFAR10-10", 1e-3, (0.5, 0.1, 0.001))):
        (axis,) = [axis for axis in table.columns if axis.label == column]
        prox, curv, reg = (composer(table.overrides_of(rows[r], axis)) for r in ("FedProx", "FedCurv", "FedReg"))
        assert (prox.methods.proximal.mu, curv.methods.fedcurv.lam) == (0.02, lam)
        ours = reg.methods.fedreg
        assert (ours.gamma, ours.eta_s, ours.eta_p) == fedreg


def refused(node, place=""):
    """Keys of a composed config that the constructor beside them does not take."""
    if node.get("_target_"):
        known = inspect.signature(get_object(node["_target_"])).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            yield from (f"{place}{key}" for key in node if key not in known and not key.startswith("_"))
    for key, value in node.items():
        yield from refused(value, f"{place}{key}.") if isinstance(value, dict) else ()


def test_every_table_can_be_built_and_the_listed_settings_are_those_of_our_configs(tables):
    """Each listed value, each key and each experiment with its network is in a cell that is composed.

    Our value is another one only where a table's ``departures`` say why.
    """
    cells, departed = [], {name: set() for name in NAMES}
    for table in tables:
        for row, column, overrides in runnable(table):
            listed = table.settings(row, column)
            cells.append(({(key, repr(value)) for key, value in listed.items()}, table, overrides, listed))
    for table in map(load, NAMES):
        assert f"table.py {table.name}" in (CONFIGS / f"{table.name}.yaml").read_text()
        for scale in {"full", "small", *table.scales}:
            jobs, places, gaps = plan(table, scale, Part())
            assert all(gaps)  # cells without a run say why
            assert len({tuple(sorted(job.overrides)) for job in jobs.values()}) == len(jobs) > 0
            assert {folder for cell in places.values() for folder in cell} == {*jobs}
            for job in jobs.values():
                files = tuple(o for o in job.overrides if o.startswith(("experiment=", "model=")))
                cells.append(({files, *(o.split("=")[0] for o in job.overrides)}, table, job.overrides, {}))

    def compare(_, table, overrides, listed):
        cfg = composer(overrides)
        assert {*refused(OmegaConf.to_container(cfg))} <= {"model.start"}, (table.name, overrides)
        ours = {key: OmegaConf.select(cfg, key, default=ABSENT) for key in listed}
        assert ABSENT not in ours.values(), (table.name, overrides)
        departed[table.name] |= {key for key in listed if ours[key] != listed[key]}

    groups = {}  # the cells with the same choices of config files, which Hydra takes long to compose
    for cell in cells:
        groups.setdefault(tuple(o for o in cell[2] if o.split("=")[0] in GROUPS), []).append(cell)
    words = {files: set().union(*(cell[0] for cell in own)) for files, own in groups.items()}
    left = set().union(*words.values())
    while left:
        files = max(words, key=lambda files: len(words[files] & left))
        for cell in groups[files]:
            if cell[0] & left:
                left -= cell[0]
                compare(*cell)
    for cell in cells:  # what departs in few of a table's cells
        if cell[3] and (cell[1].departures.keys() - departed[cell[1].name]) & cell[3].keys():
            compare(*cell)
    assert all(departed[table.name] == {*table.departures} for table in tables)


GOOD = {
    "columns": [{"label": "a"}, {"label": "b"}],
    "rows": [{"label": "r", "by_column": {"b": {"overrides": ["seed=2"]}}}, {"label": "s", "overrides": None}],
    "cells": {"r": [1, [2.5, 0.5]], "s": [{"mean": 3, "note": "failed"}, "1000+"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, ""),
        ({"columns": [{"label": "a", "mach": {}}]}, r"columns\.0\.mach: "),
        ({"columns": [{"label": "b"}] * 2}, r"each label must be there once: rows \['r', 's'\], columns \['b', 'b'\]"),
        ({"columns": [{"label": "a"}, {"label": "c"}]}, "row r: by_column names no column: b"),
        ({"cells": {"r": [1], "s": []}}, "row r: give one entry for each of the 2 columns"),
        ({"cells": {"r": [1, [2.5]], "s": [1, 2]}}, r"row r, column b: \[2.5\] is no number"),
        ({"budget": 3}, "budget: "),
        ({"shared_setting": "nothing"}, "nothing.yaml"),
    ],
)
def test_errors_name_the_file_and_the_place(tmp_path, wrong, message):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(GOOD | wrong))
    if not message:
        assert (table := load(path)).cell(table.rows[0], table.columns[0]) == Cell(1)
        return
    with pytest.raises(ValueError, match=rf"mine\.yaml is no table: .*{message}"):
        load(path)
    with pytest.raises(FileNotFoundError, match=r"the tables are .*gcfed_table5"):
        load("gcfed_table99")
