"""The two metrics of docs/bring-your-own.md give the numbers that plain PyTorch gives."""

import pytest
import torch
from conftest import read_rows
from test_docs import files_in
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from gcfed.assemble import assemble
from gcfed.run import train
from gcfed.utils.resolvers import ROOT

LR = 0.1
ONE_STEP = (
    "rounds=1",
    "precision=64-true",
    "gc=none",
    "participation.num_clients=4",
    "participation.per_round=4",
    "client.steps=1",
    "client.batch_size=2000",
    "client.optimizer.momentum=0",
    "client.optimizer.weight_decay=0",
    f"client.optimizer.lr={LR}",
)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The overrides that add the page's metrics, whose files are in a folder."""
    files = files_in((ROOT / "docs/bring-your-own.md").read_text())
    for name in ("mymetric.py", "mysizes.py"):
        (tmp_path / name).write_text(files[name])
    monkeypatch.syspath_prepend(tmp_path)
    return ["+metrics.mine._target_=mymetric.Moved", "+metrics.sizes._target_=mysizes.FirstShare"]


def gradients_of(cfg, result):
    """The gradient of each client at the first model, by name."""
    net = result.model
    data = result.trainer.datamodule
    start = dict(assemble(cfg).module.net.double().named_parameters())
    for client in range(4):
        x, y = data.fetch(torch.from_numpy(data.client(client)), None)
        loss = cross_entropy(functional_call(net, start, (x,)), y)
        gradients = torch.autograd.grad(loss, list(start.values()))
        yield dict(zip(start, gradients, strict=True))


@pytest.mark.parametrize("stack", [1, 3])
def test_the_documented_metrics_measure_what_they_say(config, tmp_path, names, stack):
    cfg = config(*ONE_STEP, *names, f"client.stack={stack}", folder=tmp_path / "run")
    result = train(cfg)
    squares = []
    for gradients in gradients_of(cfg, result):
        squares.append(torch.stack([g.square().sum() for g in gradients.values()]))
    squares_KT = torch.stack(squares)
    assert squares_KT.shape == (4, 6)
    row = read_rows(tmp_path / "run" / "metrics.csv")[-1]
    moved = LR * squares_KT.sum(1).sqrt().mean()
    assert row["mine/moved"] == pytest.approx(moved.item(), rel=1e-9)
    share = squares_KT[:, 0].sum() / squares_KT.sum()
    assert 0.01 < share < 0.99
    assert row["mine/first_share"] == pytest.approx(share.item(), rel=1e-9)
