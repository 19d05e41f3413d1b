"""Behaviour on real images: CIFAR-10, if its files are in data/."""

import pytest
import torch
from conftest import DATA_DIR, read_rows

from gcfed.assemble import build_module
from gcfed.run import train

pytestmark = pytest.mark.skipif(
    not (DATA_DIR / "cifar-10-batches-py").is_dir(), reason=f"CIFAR-10 is not in {DATA_DIR} (DATA_DIR moves it)"
)
SMALL = ("experiment=cifar10_cnn_gcfed", "partition=iid", "participation.num_clients=4", "participation.per_round=4")


def test_gcfed_learns_cifar10(config, tmp_path):
    few = ("rounds=2", "eval_every=2", "client.epochs=2", "client.batch_size=10")
    train(config(*SMALL, *few, "data.limit_train=160", "data.limit_test=100", folder=tmp_path))
    rows = read_rows(tmp_path / "metrics.csv")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.2
    assert rows[-1]["test/acc"] > 0.2  # chance is 0.1


def test_bf16_stays_near_float32(config, tmp_path):
    """After one round, the weights differ by no more than bfloat16's rounding. Parameters stay in float32."""
    updates, few = [], ("rounds=1", "client.epochs=1", "data.limit_train=8", "data.limit_test=2")
    for precision in ("32-true", "bf16-mixed"):
        cfg = config(*SMALL, *few, f"precision={precision}", folder=tmp_path / precision)
        start, end = build_module(cfg).net, train(cfg).module.net
        assert all(p.dtype == torch.float32 for p in end.parameters())
        pairs = zip(end.parameters(), start.parameters(), strict=True)
        updates.append(torch.cat([(a - b).detach().flatten() for a, b in pairs]))
    exact, rounded = updates
    assert 0 < (exact - rounded).norm() < 0.1 * exact.norm()
