"""Behaviour on real images: CIFAR-10, if its files are in data/."""

import pytest
from conftest import DATA_DIR, read_rows

from gcfed.run import train

pytestmark = pytest.mark.skipif(
    not (DATA_DIR / "cifar-10-batches-py").is_dir(),
    reason=f"CIFAR-10 is not in {DATA_DIR} (DATA_DIR moves it)",
)
SMALL = (
    "experiment=cifar10_cnn_gcfed",
    "partition=iid",
    "participation.num_clients=4",
    "participation.per_round=4",
)


def test_gcfed_learns_cifar10(config, tmp_path):
    few = ("rounds=2", "eval_every=2", "client.epochs=4", "client.batch_size=10")
    train(config(*SMALL, *few, "data.limit_train=40", "data.limit_test=100", folder=tmp_path))
    rows = read_rows(tmp_path / "metrics.csv")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] / 2
    assert rows[-1]["test/acc"] > 0.15  # chance is 0.1
