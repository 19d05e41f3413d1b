"""A foreign or edited run folder never ends a report: it is in the report, or it is named."""

import csv
import io
import shutil
from datetime import date

import pytest
import yaml
from run_folders import CONFIG, curve, write_run

from gcfed.reporting import write_report

#: What may stand in a file of someone else, instead of a number or a name.
ODD = (
    "some text",
    "",
    None,
    True,
    -1,
    0,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    [],
    [1, "a", None, [2]],
    {"a": {"b": 1}},
    {1: 2, None: 3},
    date(2026, 1, 1),
    "=1+1",
    "\x07 \u202e ￿",
    "x" * 15_000,
    [1e-9, 1e9, float("nan")],
)
KEYS = sorted(
    {key.split(".")[0] for key in CONFIG} | {"gc", "targets", "labels", "methods", "data"}
)


def tree():
    """A config as a nested mapping."""
    config = {"targets": [0.5], "labels": {"algorithm": "FedAvg"}}
    for key, value in (CONFIG | {"rounds": 4}).items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return config


@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_a_config_ends_the_report(tmp_path, capsys, key):
    """Each odd value stands at the key, and at a key below it."""
    logs = tmp_path / "logs"
    for seed in (1, 2, 3):
        write_run(logs / f"own_{seed}", curve(0.5, 4, seed), **tree() | {"seed": seed})
    names = []
    for number, value in enumerate(ODD):
        for place, changed in (("at", value), ("below", {"_target_": value, "algorithm": value})):
            names.append(f"odd_{number}_{place}")
            folder = logs / names[-1]
            shutil.copytree(logs / "own_1", folder)
            (folder / "config.yaml").write_text(yaml.safe_dump(tree() | {key: changed}))
    page = write_report(logs, out=tmp_path / "out", figures=False)
    printed = capsys.readouterr().out
    lines = (page.parent / "tables" / "runs.csv").read_text()
    for name in names:
        is_included = f"/{name}," in lines
        is_named = f"/{name}: its files cannot be read: " in printed
        assert is_included != is_named, name


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324, 0.0])
def test_extreme_numbers_do_not_end_the_report(tmp_path, value):
    for seed in (1, 2, 3):
        for name in ("a", "b"):
            rows = [{"test/acc": value, "test/loss": value, "test/rmse": value}] * 2
            write_run(
                tmp_path / f"{name}_{seed}",
                rows,
                seed=seed,
                tags={"algorithm": name},
                summary={"rounds": 2},
            )
    assert write_report(tmp_path, out=tmp_path / "out").is_file()


FORMULAS = ("=1+1", "+cmd", "-2+3", "@SUM(A1)", " =1", "\t=1", "-x", "=HYPERLINK(0)")


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_of_the_table_of_runs_is_a_formula(tmp_path, text, monkeypatch):
    """A spreadsheet computes a cell that begins with one of these characters."""
    config = tree() | {"tags": dict.fromkeys(("algorithm", "model", "data"), text)}
    del config["labels"]
    name = text.strip().replace("/", "")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / name, curve(0.5, 4), failure=f"{text}\nTraceback", **config)
    page = write_report(tmp_path, out=tmp_path / "out", figures=False)
    rows = [*csv.reader(io.StringIO((page.parent / "tables" / "runs.csv").read_text()))]
    assert rows[1][rows[0].index("method")] == f"'{text}"
    assert rows[1][rows[0].index("folder")] == f"'{name}"
    for cell in rows[1]:
        assert not cell.strip().startswith(("=", "+", "-", "@")), cell


def test_negative_numbers_stay_numbers(tmp_path):
    write_run(tmp_path / "a", [{"test/acc": 0.5, "val/gain": -0.25}], **tree())
    page = write_report(tmp_path, out=tmp_path / "out", measures="val/gain", figures=False)
    (row,) = csv.DictReader(io.StringIO((page.parent / "tables" / "runs.csv").read_text()))
    assert row["val/gain"] == "-0.25"
