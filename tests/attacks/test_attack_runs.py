"""Attacks: whole runs equal plain loops that replace the messages or the labels of
hostile clients.
"""

from statistics import NormalDist

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import Plain, check, draw, seeds

from gcfed.data.base import FederatedDataset, Split


class Hostile(Plain):
    """A share of 0.26 of ten clients is hostile, which is rounded to three."""

    n = 10
    cohort = 9
    share = 0.26

    def begin(self):
        self.hostile = set(draw("hostile").choice(self.n, 3, replace=False).tolist())

    def sent(self, t, deltas):
        hostile = {k: deltas[k] for k in deltas if k in self.hostile}
        honest = [deltas[k] for k in deltas if k not in self.hostile]
        self.row["train/hostile_clients"] = len(hostile)
        for k, delta in hostile.items():
            self.craft(t, k, delta, honest, len(hostile))

    def craft(self, t, k, delta, honest, many): ...


class Noise(Hostile):
    overrides = (
        "attack=gaussian",
        "attack.clients=0.26",
        "attack.factor=0.7",
        "participation.per_round=9",
    )

    def craft(self, t, k, delta, honest, many):
        g = torch.Generator().manual_seed(
            int(seeds("attack", t, k).generate_state(1, np.uint64)[0] >> 1)
        )
        for name, d in delta.items():
            rms = d.square().sum().div(d.numel()).sqrt()
            delta[name] = 0.7 * rms * torch.randn(d.shape, generator=g, dtype=torch.float64)


class Enough(Hostile):
    overrides = ("attack=alie", "attack.clients=0.26", "attack.z=null", "participation.per_round=9")

    def craft(self, t, k, delta, honest, many):
        n = len(honest) + many
        s = (len(honest) + many) // 2 + 1 - many
        z = NormalDist().inv_cdf((n - many - s) / (n - many))
        assert z > 0
        for name in delta:
            values = torch.stack([h[name] for h in honest]).numpy()
            delta[name] = torch.from_numpy(values.mean(0) - z * values.std(0))


def words(data_dir, download):
    """Sequences of five tokens from 12 speakers, with a label for each token.

    Some end with padding, or are padding.
    """
    rng = np.random.default_rng(2)
    groups = np.repeat(np.arange(12), rng.integers(3, 12, 12))
    x = rng.integers(0, 6, (len(groups), 5)).astype(np.uint8)
    y = (x + 1 + (rng.random(x.shape) < 0.2)).astype(np.int64) % 6
    y[np.arange(5) >= rng.choice([0, 0, 3, 5], (len(y), 1))] = -100
    return FederatedDataset("words", 6, train=Split(x, y, groups), test=Split(x, y, groups))


class Flipped(Hostile):
    """Labels of sequences are flipped. Padding stays padding and has no loss."""

    overrides = (
        "attack=label_flip",
        "attack.clients=0.26",
        "data=tiny_shakespeare",
        f"data.dataset._target_={__name__}.words",
        "model=lstm",
        "model.embedding=3",
        "model.hidden=4",
        "data.num_classes=6",
        "data.input_shape=[5]",
        "data.limit_train=null",
        "participation.num_clients=10",
        "participation.per_round=9",
    )
    inputs = staticmethod(torch.Tensor.long)
    skewed = False

    def begin(self):
        super().begin()
        for k in self.hostile:
            own = self.y[self.clients[k]]
            self.y[self.clients[k]] = torch.where(own == -100, own, 5 - own)

    def objective(self, w, x, y, k):
        loss = F.cross_entropy(w(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        mean = loss / (y >= 0).sum().clamp(min=1)
        return mean, mean


@pytest.mark.parametrize("case", [Noise, Enough, Flipped])
def test_a_run_equals_the_plain_loop(config, tmp_path, case):
    check(case, config, tmp_path)
