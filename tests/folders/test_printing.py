"""A run prints a line at its start and a table at its end."""

import logging
import re

import pytest
from run_folders import accuracies, write_run
from torch import nn

from gcfed.assemble import assemble
from gcfed.folders.folder import read_run
from gcfed.folders.printing import print_summary
from gcfed.folders.summary import summary_of
from gcfed.run import train
from gcfed.utils.compose import shorthand

FAST = (
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=200",
    "data.limit_test=60",
)


OWN = "clients' own models"


class Adapted(nn.Sequential):
    """It trains 132 of its 902 parameters."""

    def __init__(self):
        super().__init__(
            nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 12), nn.Linear(12, 10, bias=False)
        )
        super().requires_grad_(False)
        self[2].requires_grad_()


WEIGHTED = "aggregator=weighted_mean"
BY_SAMPLES = "mean weighted by samples"
UNWEIGHTED = "unweighted mean"
HINT = f"{UNWEIGHTED} ({WEIGHTED} weights clients by their samples)"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["algorithm=fedavg"], HINT),
        (["algorithm=fedprox"], HINT),
        (["algorithm=fedavg", WEIGHTED], BY_SAMPLES),
        (["algorithm=scaffold"], UNWEIGHTED),  # it refuses weights
        (["algorithm=gcfed"], UNWEIGHTED),
        (["algorithm=fedavg", "aggregator=median"], "Median"),
    ],
)
def test_the_first_line_of_a_run_names_the_aggregator(config, words, expected):
    assembly = assemble(config(*FAST, *words))
    assert str(assembly).endswith(f"; aggregator: {expected}")


def test_a_run_prints_what_it_trains_and_its_results(config, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    asked = (
        "metrics=[personal,drift]",
        "data.client_test=0.3",
        "data.validation=0.1",
        "targets=[0.01]",
        "rounds=3",
    )
    faults = (
        "participation.per_round=5",
        "participation.faults.extra=2",
        "participation.faults.stragglers=0.9",
    )
    own = shorthand([f"model._target_={__name__}.Adapted"])
    folder = tmp_path / "metrics=[personal]"  # rich must not read this as markup
    cfg = config(*FAST, *asked, *faults, *own, "gc=none", folder=folder)
    monkeypatch.chdir(tmp_path)  # paths are printed as they are shortest
    with caplog.at_level(logging.INFO):
        train(cfg)
    assert "Adapted with 132 trained parameters; 8 clients" in caplog.text
    assert "UniformSampler(per_round=7); methods: none; aggregator: unweighted mean" in caplog.text
    printed = capsys.readouterr().out
    run = read_run(folder)
    assert f"  {folder.name}\n" in printed
    last = run.metrics.iloc[-1]
    rows = dict(re.findall(r"^│ (.+?) +│ (.+?) +│$", printed, re.MULTILINE))
    assert rows["mean of the last 3 rounds"] == f"{run.metrics['test/acc'].mean():.2%}"
    assert f"acc {last['val/acc']:.2%}" in rows["val"]
    assert rows["to 1%"].startswith("1 round, ")
    assert rows["global model, test accuracy"] == f"{last['test/acc']:.2%}"
    for model, name in (("global", "global model on clients' tests"), ("local", OWN)):
        acc, worst, spread = (last[f"personal/{model}_{f}"] for f in ("acc", "worst10", "std"))
        texts = [f"{acc:.2%}", f"worst tenth {worst:.2%}", f"standard deviation {spread:.2%}"]
        assert rows[name] == ", ".join(texts)
    assert "result" not in rows  # it is the global model's test
    assert run.summary["result"] == "test/acc"
    assert f"cosine {last['drift/cosine']:.4g}" in rows["drift"]
    assert float(rows["dropped clients"]) == run.metrics["train/dropped_clients"].sum() > 0


def printed_rows(capsys, summary, rows, folder):
    """Writes a run with these rows and its summary; returns the printed title and table."""
    run = write_run(folder, rows, summary=summary)
    print_summary(run.summary, run.metrics, folder)
    printed = capsys.readouterr().out
    table = dict(re.findall(r"^│ (.+?) +│ (.+?) +│$", printed, re.MULTILINE))
    return printed.splitlines()[0].strip(), table


def test_the_table_begins_with_the_result_that_the_method_declares(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    column = "personal/local_acc"
    rows = accuracies(0.25, **{column: [0.875]})
    metrics = write_run(tmp_path / "a", rows).metrics
    title, table = printed_rows(
        capsys, summary_of(metrics, [0.2], result=column), rows, tmp_path / "b"
    )
    assert title == "1 round"
    assert next(iter(table)) == "result"
    assert table["result"] == "87.50%, clients' own models"
    assert table["to 20%"].startswith("1 round, ")
    unmeasured = summary_of(metrics.drop(columns=column), [], result=column)
    _, table = printed_rows(capsys, unmeasured, accuracies(0.25), tmp_path / "c")
    remedy = "(measure it by metrics=personal data.client_test=0.2)"
    assert table["result"] == f"clients' own models, not measured {remedy}"


def test_targets_that_differ_have_rows_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rows = accuracies(0.5, 0.655, 0.6572)
    targets = [0.29, 0.651, 0.654, 0.657]
    metrics = write_run(tmp_path / "a", rows).metrics
    _, table = printed_rows(capsys, summary_of(metrics, targets), rows, tmp_path / "b")
    reached = {label: text.partition(",")[0] for label, text in table.items() if label[:3] == "to "}
    rounds = ("1 round", "2 rounds", "2 rounds", "3 rounds")
    labels = ("to 29%", "to 65.1%", "to 65.4%", "to 65.7%")
    assert reached == dict(zip(labels, rounds, strict=True))
