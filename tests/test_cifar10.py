"""Behaviour on real images: CIFAR-10, where its files are in data/."""

import numpy as np
import pytest
import torch
from conftest import DATA_DIR, read_rows

from gcfed.run import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (DATA_DIR / "cifar-10-batches-py").is_dir(), reason=f"CIFAR-10 is not in {DATA_DIR} (DATA_DIR moves it)"
    ),
]
SMALL = ("experiment=cifar10_cnn_gcfed", "data.limit_train=2000", "data.limit_test=500", "participation.num_clients=20")


def test_gcfed_learns_cifar10(config, tmp_path):
    train(config(*SMALL, "rounds=4", "data.limit_train=1000", "partition=iid", folder=tmp_path))
    rows = read_rows(tmp_path / "metrics.csv")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.2
    assert rows[-1]["test/acc"] > 0.2  # chance is 0.1


def test_bf16_stays_near_float32(config, tmp_path):
    """One round: the same samples, weights within bfloat16's rounding of each other, parameters kept in float32."""
    updates = []
    for precision in ("32-true", "bf16-mixed"):
        args = ("rounds=1", f"precision={precision}", "client.epochs=1")
        start = train(config(*SMALL, *args, "client.optimizer.lr=0", folder=tmp_path / f"start{precision}"))
        end = train(config(*SMALL, *args, folder=tmp_path / precision))
        pairs = zip(end.module.net.parameters(), start.module.net.parameters(), strict=True)
        updates.append(torch.cat([(a - b).detach().flatten() for a, b in pairs]))
        assert all(p.dtype == torch.float32 for p in end.module.net.parameters())
    exact, rounded = updates
    assert 0 < (exact - rounded).norm() < 0.1 * exact.norm()


def test_crops_and_flips_are_what_the_draws_say(config):
    """Against a loop over images: pad with black, cut the window, mirror, normalise."""
    from gcfed.utils.instantiate import build

    cfg = config(*SMALL)
    data = build(cfg.data)
    data.setup()
    data.to_device(torch.device("cpu"), torch.float64, torch.contiguous_format)
    index = torch.arange(12).view(3, 4)
    draws = data.draw(np.random.default_rng(0), (3, 4))
    x, y = data.fetch(index, torch.from_numpy(draws))
    raw, labels = data._train
    for i, j in np.ndindex(3, 4):
        image = raw[index[i, j]].numpy()
        row, column, flip = draws[i, j]
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
        window = padded[:, row : row + 32, column : column + 32]
        window = window[:, :, ::-1] if flip else window
        mean, std = (np.array(cfg.data.transform[k])[:, None, None] for k in ("mean", "std"))
        np.testing.assert_allclose(x[i, j].numpy(), (window / 255 - mean) / std, atol=1e-12)
        assert y[i, j] == labels[index[i, j]]
    many = data.draw(np.random.default_rng(1), (20000,))
    for axis, top in ((0, 8), (1, 8), (2, 1)):
        assert np.bincount(many[:, axis]).shape == (top + 1,)
        np.testing.assert_allclose(np.bincount(many[:, axis]) / 20000, 1 / (top + 1), atol=0.012)
