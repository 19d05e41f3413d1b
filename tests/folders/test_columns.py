"""Each documented column says which value is better."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torchmetrics
from conftest import refuses
from run_folders import run_of

from gcfed.folders.columns import (
    COLUMNS,
    better,
    is_summary_number,
    known_better,
    named_better,
)
from gcfed.folders.measures import parse, value
from gcfed.metrics.by_name import make

CONCEPTS = Path(__file__).parents[2] / "docs" / "concepts.md"
FILES = ("cohorts.csv", "updates.csv")
OF_TORCHMETRICS = ("test/auroc", "test/f1")
KNOWN = [known.name for known in COLUMNS if not is_summary_number(known.name)]


def documented():
    """The columns of the table "What the numbers mean", as patterns."""
    table = CONCEPTS.read_text(encoding="utf-8").partition("## What the numbers mean")[2]
    for line in table.partition("\n\nTensorBoard")[0].splitlines():
        section = ""
        for name in re.findall("`([^`]+)`", line.split("|")[1] if "|" in line else ""):
            # `gap/l2`, `relative`: both are of gap
            column = name if "/" in name or not section else f"{section}/{name}"
            section = column.partition("/")[0]
            pattern = re.sub("<[a-z]+>|…|{[a-z,]+}", "*", column)
            if pattern not in (*FILES, *OF_TORCHMETRICS):
                yield pattern


def match(one, other):
    return fnmatchcase(one, other) or fnmatchcase(other, one)


@pytest.mark.parametrize("name", [*documented()])
def test_each_documented_column_has_a_direction(name):
    prefix, _, end = name.rpartition("/")
    names = (name, f"{prefix}/*_{end}", f"{name.rstrip('*')}acc")
    assert any(match(one, known) for one in names for known in KNOWN)


def test_each_known_column_is_documented():
    sections = {pattern.partition("/")[0] for pattern in documented()}
    assert {pattern.partition("/")[0] for pattern in KNOWN} == sections


@pytest.mark.parametrize(
    ("column", "direction"),
    [
        *((f"forgetting/{name}", "lower") for name in ("before", "after", "own", "others")),
        ("gap/l2", "lower"),
        ("gap/relative", "lower"),
        ("gap/cosine", "higher"),
        ("train/nonfinite_clients", "lower"),
        ("train/refused_steps", "lower"),
        ("train/dropped_clients", "lower"),
        ("train/samples", "neither"),
        ("late/lost", "lower"),
        ("acc_diff/std", "lower"),
        ("personal/local_std", "lower"),
        ("personal/local_acc", "higher"),
        ("test/acc_ema", "higher"),
        ("gc/share_model/fc1.weight", "neither"),
        ("mine/score", "higher"),
        ("mine/loss", "lower"),
    ],
)
def test_directions(column, direction):
    assert better(column) == direction


@pytest.mark.parametrize(
    "column", ["privacy/attack_acc", "late/share", "angle/cosine", "forgetting/kept_acc", "gc/acc"]
)
def test_a_users_column_is_unknown_beside_ours(column):
    assert known_better(column) is None
    assert better(column) == "higher"


@pytest.mark.parametrize("name", ["nll", "mape", "brier", "brier_score", "cross_entropy"])
def test_less_of_a_users_error_is_better(name):
    assert better(f"test/{name}") == "lower"
    assert parse(f"best:test/{name}") == parse(f"min:test/{name}")


def test_the_best_of_a_column_whose_name_says_nothing_is_refused():
    assert named_better("mine/rank") is None
    with refuses("not known whether more or less .* Write max:mine/rank or min:mine/rank"):
        parse("best:mine/rank")
    with refuses(r"Write max:test/ac or min:test/ac\."):
        parse("best:test/ac")


def metrics_of_torchmetrics():
    for name in torchmetrics.__all__:
        for classes in (10, None):
            try:
                yield name, make(name, classes).higher_is_better
            except ValueError:
                continue


def test_metrics_of_torchmetrics_have_its_direction_in_any_spelling():
    known = {name: higher for name, higher in metrics_of_torchmetrics() if higher is not None}
    assert known["HammingDistance"] is False
    for name, higher in known.items():
        words = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        for spelling in (name, name.lower(), words):
            for column in (f"test/{spelling}", f"personal/local_{spelling}"):
                assert named_better(column) == ("higher" if higher else "lower"), column


def test_the_best_of_a_column_without_direction_is_refused():
    with refuses("^measure='best:train/samples': neither more nor less of train/samples"):
        value(run_of(), "best:train/samples")
