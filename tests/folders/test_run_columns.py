"""What ``check_buildable`` says that a run writes is what a run of the same config has written."""

import json
from fnmatch import fnmatchcase

import pytest
from conftest import read_rows, refuses

from gcfed.assemble import check_buildable
from gcfed.federated.parts import ServerPart
from gcfed.folders.columns import (
    COLUMNS,
    is_summary_number,
    known_better,
    matches,
    numbers_of,
)
from gcfed.folders.run_columns import RunColumns
from gcfed.metrics.base import OwnNumbers, ServerMetric
from gcfed.run import train

SMALL = (
    "rounds=2",
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=200",
    "data.limit_test=60",
)
FAULTS = "participation.faults"
CLIP = "+methods.clip_update"
SETTINGS = {
    "default": (),
    "without smoothing": ("~callbacks.smoothing",),
    "validation": ("data.validation=0.1",),
    "validation of a regression": ("data=matrix_regression", "data.validation=0.1"),
    "known optimum": (
        "data=matrix_regression",
        "metrics=relative_error",
        "data.limit_train=null",
        "model=linear",
        "partition=iid",
    ),
    "language": ("task._target_=gcfed.tasks.LanguageModel", "data.validation=0.2"),
    "clients' tests": ("metrics=personal", "data.client_test=0.3"),
    "torchmetrics": ("metrics=torchmetrics", "metrics.torchmetrics.names=[f1,auroc]"),
    "torchmetrics of clients": (
        "metrics=torchmetrics",
        "metrics.torchmetrics.names=[accuracy]",
        "data.client_test=0.3",
    ),
    "classes": ("metrics=[classes,clients,updates,cohorts]", "metrics.clients.every=1"),
    "drift": ("metrics=[drift,angle,cka,gap,forgetting]",),
    "GC": ("metrics=[coherence,gc_share]", "gc=none"),
    "faults": (f"{FAULTS}.dropout=0.1",),
    "time": ("participation.clock.step=0.1",),
    "late clients": ("participation=buffered", "algorithm=fedbuff"),
    "an attack": ("attack=sign_flip", "algorithm=fedgc"),
    "CGC": ("algorithm=fedgc", "methods.fedgc.sgc=false"),
    "bounds": (
        f"{CLIP}._target_=gcfed.methods.upload.clip_update.ClipUpdate",
        f"{CLIP}.max_norm=1.0",
    ),
    "as bytes": ("federation=wire",),
    "a personal method": ("algorithm=fedrep", "metrics=personal", "data.client_test=0.3"),
}


def agree(columns, patterns):
    """Whether each column matches a pattern, and each pattern a column."""
    columns = [*columns]
    for column in columns:
        if not any(fnmatchcase(column, pattern) for pattern in patterns):
            return f"{column} is not expected"
    for pattern in patterns:
        if not any(fnmatchcase(column, pattern) for column in columns):
            return f"{pattern} is not written"
    return ""


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_run_writes_what_it_should(config, tmp_path, settings):
    cfg = config(*SMALL, *settings, folder=tmp_path / "run")
    written = check_buildable(cfg)
    train(cfg)
    columns = {name for row in read_rows(tmp_path / "run/metrics.csv") for name in row}
    assert not written.is_open
    assert agree(columns, written.columns) == ""
    for column in columns:
        assert not is_summary_number(column)
        assert known_better(column) or "metrics=torchmetrics" in settings, column
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    numbers = [name for name, value in summary.items() if isinstance(value, int | float)]
    assert agree(filter(is_summary_number, numbers), numbers_of(written.columns)) == ""


class Silent(ServerPart): ...


class Quiet(ServerPart):
    """Declares what it writes."""

    writes = ("mine/score",)

    def on_round_end(self, row, round):
        row["mine/score"] = 1.0


class Louder(Quiet):
    """Adds a column without a word."""

    def on_round_end(self, row, round):
        super().on_round_end(row, round)
        row["mine/more"] = 2.0


class Means(OwnNumbers):
    numbers = ("mine/mean",)


class Built(OwnNumbers):
    def __init__(self):
        super().__init__()
        self.numbers = ("mine/built",)


class Late(OwnNumbers):
    """Knows its columns from ``bind`` on."""


class Whatever(ServerMetric):
    def columns(self, round):
        return {"mine/whatever": 1.0}


@pytest.mark.parametrize(
    ("part", "columns"),
    [
        (Silent, ()),
        (Quiet, ("mine/score",)),
        (Louder, None),
        (Means, ("mine/mean",)),
        (Built, ("mine/built",)),
        (Late, None),
        (Whatever, None),
    ],
)
def test_what_a_users_part_writes(part, columns):
    assert part().known_columns == columns


WRITTEN = RunColumns(("test/acc", "test/loss", "round", "comm/up_bytes", "gc/rho/*"))


@pytest.mark.parametrize(
    ("column", "rest"),
    [
        ("test/acurracy", r": did you mean test/acc\?"),
        ("gc/roh/fc1", r"\. There are gc/rho/\*\."),
        ("val/acc", r": set data\.validation=0\.1\."),
        ("personal/local_acc", r": set metrics=personal data\.client_test=0\.2\."),
        ("drift/cosine", r": set metrics=drift\."),
        ("late/max", r": set participation=buffered\."),
        ("clock/seconds", r": set participation\.clock\.step=0\.01\."),
        ("test/acc_ema", r": leave ~callbacks\.smoothing out\."),
        ("test/nonsense", r"\. There are test/acc, test/loss\."),
        ("xyz", r"\. There are test/acc, test/loss, round, comm/up_bytes, gc/rho/\*\."),
    ],
)
def test_a_refusal_says_what_helps(column, rest):
    with refuses(f"^monitor={column}: a run with these settings never writes {column}{rest}$"):
        WRITTEN.require(column, f"monitor={column}")


@pytest.mark.parametrize(
    ("column", "rest"),
    [
        ("late/men", r": did you mean late/mean or late/max\?"),
        ("val/acc", r"\. There are val/loss, val/rmse\."),
    ],
)
def test_a_remedy_that_is_set_is_not_suggested(column, rest):
    written = RunColumns(("late/mean", "late/max", "val/loss", "val/rmse"))
    with refuses(f"never writes {column}{rest}$"):
        written.require(column, "monitor")


def test_what_is_written_is_not_refused():
    for column in ("test/acc", "gc/rho/fc1.weight"):
        WRITTEN.require(column, "monitor")
    for number in ("test/acc_best", "test/loss_best", "acc_diff/std", "partition/hellinger"):
        WRITTEN.require_measure(number, "measure")
    RunColumns((), is_open=True).require("mine/score", "monitor")


@pytest.mark.parametrize(
    ("measure", "rest"),
    [
        ("test/rmse_best", r"never writes test/rmse_best: did you mean test/loss_best\?"),
        ("mean:test/acurracy[10]", r"never writes test/acurracy: did you mean test/acc\?"),
        ("comm/up_bytes", r" may be the last round or all .* or total:comm/up_bytes\."),
    ],
)
def test_a_measure_that_a_run_never_has(measure, rest):
    with refuses(rest):
        WRITTEN.require_measure(measure, f"measure={measure}")


#: The columns of other tasks than classification.
OF_OTHER_TASKS = {"val/perplexity", "val/rmse", "test/relative_error"}


def test_each_remedy_makes_a_run_write_its_columns(config):
    names_of: dict[str, list[str]] = {}
    for column in COLUMNS:
        if column.remedy.startswith("set ") and column.name not in OF_OTHER_TASKS:
            names_of.setdefault(column.remedy, []).append(column.name)
    assert len(names_of) > 8
    for remedy, names in names_of.items():
        written = check_buildable(config(*remedy.removeprefix("set ").split()))
        for name in names:
            assert any(matches(column, [name]) for column in written.columns), (name, remedy)
