"""``train(cfg)`` in float64 equals a plain federated loop."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from omegaconf import open_dict
from plain import BATCH, Plain, check, draw, normalized

from gcfed.run import evaluate, train


def cropped(x, draws, padding=2):
    """Crops images with a black border at the drawn rows and columns, and mirrors about half of
    them.
    """
    side = x.shape[-1]
    x = F.pad(x, (padding,) * 4)
    windows = [
        image[:, r : r + side, c : c + side] for image, (r, c, _) in zip(x, draws, strict=True)
    ]
    return torch.stack(
        [w.flip(-1) if mirror else w for w, (_, _, mirror) in zip(windows, draws, strict=True)]
    )


def center(net, names):
    """Subtracts the means over each output's inputs from the gradients."""
    for name, p in net.named_parameters():
        if name in names:
            means = p.grad.mean(tuple(range(1, p.dim())), keepdim=True)
            p.grad -= means if means.numel() < p.numel() else 0  # a single number is its own mean


class Numbers(Plain):
    """Adds GC, a server optimizer and the test of the global model."""

    n = 5
    cohort = 3
    samples = 70
    atol = 1e-9
    by_samples = False
    crop = False
    local = ()
    server = ()
    server_lr = 1.0
    beta = 0.0

    def begin(self):
        assert max(map(len, self.clients)) > 2 * min(map(len, self.clients))
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=self.server_lr, momentum=self.beta
        )

    def came(self, t, drawn):
        return {k: 10**6 for k in drawn if k != self.broken}

    def images(self, k, step, batch):
        if not self.crop:
            return self.x[batch]
        steps = 2 * -(-len(self.clients[k]) // BATCH)
        drawn = draw("augment", self.t, k).integers(0, (5, 5, 2), size=(steps, BATCH, 3))
        return cropped(self.x[batch], drawn[step, : len(batch)].tolist())

    def correct(self, w, k):
        center(w, self.local)

    def server_step(self, deltas):
        shares = np.array([len(self.clients[k]) if self.by_samples else 1 for k in deltas], float)
        mean = {
            name: sum(
                p * d[name] for p, d in zip(shares / shares.sum(), deltas.values(), strict=True)
            )
            for name in next(iter(deltas.values()))
        }
        for name, p in self.net.named_parameters():
            p.grad = -mean[name]
        for name, value in self.net.named_buffers():
            if value.is_floating_point():
                value += mean[name]
        center(self.net, self.server)
        self.optimizer.step()
        x, y = map(torch.from_numpy, (self.test.x, self.test.y))
        logits = self.net.eval()(normalized(x)).detach()
        self.row = {
            "train/loss": self.row["train/loss"],
            "train/nonfinite_clients": self.cohort - len(deltas),
            "test/acc": (logits.argmax(1) == y).double().mean().item(),
            "test/loss": F.cross_entropy(logits, y).item(),
        }


CONV = ("model=cnn", "gc.boundary=fc")
WEIGHTS = ("conv1.weight", "conv2.weight", "conv3.weight", "fc.weight")
BOTH = {"local": ("fc1.weight",), "server": ("fc1.weight", "fc2.weight")}
CASES = {
    "by samples": (["gc=none", "aggregator.weighting=samples"], {"by_samples": True}),
    "gcfed, server momentum": (
        ["gc=gcfed", "algorithm=fedavgm", "server.lr=0.7", "server.momentum=0.5"],
        {"server_lr": 0.7, "beta": 0.5, **BOTH},
    ),
    "gcfed, stack, one left out": (["gc=gcfed", "client.stack=2"], {"broken": 2, **BOTH}),
    "crops and flips": (
        ["gc=none", "data.transform.crop_padding=2", "data.transform.flip=true", "client.stack=2"],
        {"crop": True},
    ),
    "local by λ, convolutions": (
        [*CONV, "gc=local", "gc.lam=0.5"],
        {"local": WEIGHTS[:2]},
    ),
    "gcfed, convolutions, stack": (
        [*CONV, "gc=gcfed", "client.stack=2"],
        {"local": WEIGHTS[:3], "server": WEIGHTS},
    ),
    "dropout and running statistics": (
        [*CONV, "gc=gcfed"],
        {"local": WEIGHTS[:3], "server": WEIGHTS},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_plain_loop(config, tmp_path, case):
    overrides, differs = CASES[case]
    model = {"special": "dropout" in case} if "model=cnn" in overrides else None
    names = {"overrides": ("data.limit_test=null", *overrides), "model": model, **differs}
    check(type("Case", (Numbers,), names), config, tmp_path)


def test_an_accuracy_that_equals_a_target_reaches_it(config, tmp_path):
    """As a float32, 0.7 is less than 0.7."""
    cfg = config(
        "rounds=15",
        "seed=1",
        "gc=none",
        "data.limit_train=300",
        "data.limit_test=10",
        "model.hidden=[20]",
        "participation.num_clients=5",
        "participation.per_round=3",
        "targets=[0.7]",
        folder=tmp_path / "run",
    )
    result = train(cfg)
    acc = pd.read_csv(tmp_path / "run/metrics.csv", index_col="round")["test/acc"]
    assert set(acc) <= {right / 10 for right in range(11)}
    first = (acc >= 0.7).idxmax()
    assert acc[first] == 0.7
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rounds_to_target"] == {"0.7": first}
    with open_dict(cfg):
        cfg.ckpt_path = str(tmp_path / "run/checkpoints/last.ckpt")
    assert evaluate(cfg)["test/acc"] == acc.iloc[-1] == result.metrics["test/acc"]
