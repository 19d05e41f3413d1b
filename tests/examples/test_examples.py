"""The commands of examples/README.md run as a user types them.

FedExP's step has the length that its paper gives.
"""

import re
import shlex

import pytest
import torch
from conftest import type_command
from harness import Spy, assert_near, make_net, random_federation, sgd, train_rounds, weights

import gcfed.run  # noqa: F401  (forked processes have it)
from gcfed.folders.reading import read_metrics
from gcfed.utils.resolvers import ROOT

EXAMPLES = ROOT / "examples"
TEXT = (EXAMPLES / "README.md").read_text()
COMMANDS = dict(re.findall(r"^\*\*(\w+)\*\*.*\n\n    python (.*)$", TEXT, re.MULTILINE))
SHORT = (
    "rounds=2",
    "data.limit_test=40",
    "extras.figures=false",
    "trainer.devices=1",
    "~logger.tensorboard",
)


def test_every_example_has_its_command():
    assert sorted(COMMANDS) == sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_runs(name, tmp_path, monkeypatch):
    short = [
        *SHORT,
        f"paths.log_dir={tmp_path}",
        *["hydra.sweeper.n_trials=1"] * (name == "search"),
    ]
    script, *words = shlex.split(COMMANDS[name])
    assert (EXAMPLES / name / script).samefile(ROOT / "src/train.py")
    monkeypatch.chdir(EXAMPLES / name)
    type_command(tmp_path, "train.py", *words, *short)
    (rows,) = tmp_path.rglob("metrics.csv")
    assert len(read_metrics(rows)) == 2


class Record(Spy):
    """Keeps the clients' updates in the order of their arrival."""

    def __init__(self):
        self.updates = []

    def on_receive(self, upload, round):
        stacked = torch.cat([t.flatten(1) for t in upload.delta.values()], 1)
        self.updates += [row.clone() for row in stacked]


@pytest.mark.parametrize("lr", [1e-3, 0.5])  # updates shorter and longer than ε
def test_fedexp_uses_the_step_of_its_paper(monkeypatch, lr):
    monkeypatch.syspath_prepend(EXAMPLES / "method")
    from fedexp import FedExP

    net = make_net()
    record = Record()
    before = weights(net).clone()
    after = train_rounds(
        net,
        random_federation(),
        sgd(lr=lr),
        rounds=1,
        cohort_of=5,
        methods=[record, FedExP(1e-3)],
        k=2,
    )
    updates_MP = torch.stack(record.updates)
    mean = updates_MP.mean(0)
    squares = updates_MP.square().sum()
    eta = max(1.0, float(squares / (2 * 5 * (mean.square().sum() + 1e-3))))
    assert (eta > 1.0) == (lr == 0.5)
    assert_near(after - before, eta * mean, 1e-9)
