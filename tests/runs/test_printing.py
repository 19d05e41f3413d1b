"""A run prints a line at its start and a table at its end."""

import logging
import re

import pytest
from torch import nn

from gcfed.assemble import assemble
from gcfed.run import train
from gcfed.runs.folder import read_run
from gcfed.utils.compose import shorthand

FAST = (
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=200",
    "data.limit_test=60",
)


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
    parts = assemble(config(*FAST, *words))
    assert str(parts).endswith(f"; aggregator: {expected}")


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
    with caplog.at_level(logging.INFO):
        train(config(*FAST, *asked, *faults, *own, "gc=none", folder=folder))
    assert "Adapted with 132 trained parameters; 8 clients" in caplog.text
    assert "UniformSampler(per_round=7); methods: none; aggregator: unweighted mean" in caplog.text
    printed, run = capsys.readouterr().out, read_run(folder)
    assert f"  {folder}\n" in printed
    last = run.metrics.iloc[-1]
    rows = dict(re.findall(r"^│ (.+?) +│ (.+?) +│$", printed, re.MULTILINE))
    assert rows["mean of the last 3 rounds"] == f"{run.metrics['test/acc'].mean():.2%}"
    assert f"acc {last['val/acc']:.4g}" in rows["val"]
    assert rows["to 1%"].startswith("1 rounds, ")
    assert f"local_acc {last['personal/local_acc']:.4g}" in rows["personal"]
    assert f"cosine {last['drift/cosine']:.4g}" in rows["drift"]
    assert float(rows["dropped clients"]) == run.metrics["train/dropped_clients"].sum() > 0
