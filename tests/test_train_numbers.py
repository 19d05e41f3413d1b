"""``train(cfg)`` in float64 against a plain federated loop: one client after the other, torch's own SGD and autograd.

Of the engine the plain loop uses nothing. It reads the partition that the run wrote, begins at the run's first weights
and repeats its draws of cohorts and batches, whose streams are thereby pinned too.
"""

import copy
import zlib

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from harness import Spy
from lightning.pytorch import Callback
from omegaconf import open_dict
from torch import nn

from gcfed.run import train

SEED, ROUNDS, N, COHORT, BATCH, LR, DECAY, WEIGHT_DECAY, MOMENTUM, CLIP = 4, 3, 5, 3, 8, 0.2, 0.5, 0.05, 0.6, 0.4
SETTING = (
    "precision=64-true", f"seed={SEED}", f"rounds={ROUNDS}", f"participation.num_clients={N}",
    f"participation.per_round={COHORT}", "partition.alpha=0.1", "data.limit_train=70", "data.eval_batch_size=100",
    "client.epochs=2", f"client.batch_size={BATCH}", f"client.lr_decay={DECAY}", f"client.clip_norm={CLIP}",
    f"client.optimizer.lr={LR}", f"client.optimizer.momentum={MOMENTUM}",
    f"client.optimizer.weight_decay={WEIGHT_DECAY}",
)  # fmt: skip


class Net(nn.Module):
    """Every kind of tensor: convolutions of one and two axes, linear layers, and running statistics where wanted."""

    def __init__(self, norm=False, dropout=False):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 3, stride=2), nn.Conv2d(2, 3, (3, 2))
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.conv3, self.fc = nn.Conv1d(3, 2, 2), nn.Linear(2, 10)
        self.dropout = nn.Dropout(0.3) if dropout else nn.Identity()

    def forward(self, x):
        h = self.norm(self.conv2(self.conv1(x).tanh())).tanh()
        return self.fc(self.conv3(self.dropout(h).flatten(2)).tanh().flatten(1))


class FirstWeights(Callback):
    """Keeps the network as the run begins."""

    def on_fit_start(self, trainer, pl_module):
        self.net = copy.deepcopy(pl_module.net)


class Breaks(Spy):
    """One client sends a number that is not finite."""

    def __init__(self, client):
        self.client = client

    def send(self, upload, own, download):
        next(iter(upload.delta.values()))[upload.clients == self.client] = float("inf")


def run(config, folder, *overrides, net=None, broken=None):
    """A run's result, and the network that it began with."""
    cfg = config(*overrides, folder=folder)
    with open_dict(cfg):
        if net is not None:
            cfg.model = {"_target_": f"{__name__}.Net", **net}
        cfg.callbacks.first = {"_target_": f"{__name__}.FirstWeights"}
        if broken is not None:
            cfg.callbacks.breaks = {"_target_": f"{__name__}.Breaks", "client": broken}
    result = train(cfg)
    return result, next(c for c in result.trainer.callbacks if isinstance(c, FirstWeights)).net


def seeds(purpose, *ids):
    """Where the stream of a purpose begins, as the project promises it to whoever repeats a run."""
    return np.random.SeedSequence(SEED, spawn_key=(zlib.crc32(purpose.encode()), *ids))


def draw(purpose, *ids):
    return np.random.Generator(np.random.Philox(seeds(purpose, *ids)))


def normalized(x):
    return (x.double() / 255 - 0.3) / 0.37


def cropped(x, draws, padding=2):
    """Windows of images with a black border, at drawn rows and columns; every second one or so is mirrored."""
    x, side = F.pad(x, (padding,) * 4), x.shape[-1]
    windows = [image[:, r : r + side, c : c + side] for image, (r, c, _) in zip(x, draws, strict=True)]
    return torch.stack([w.flip(-1) if mirror else w for w, (_, _, mirror) in zip(windows, draws, strict=True)])


MEAN_OVER = {"out": (1, 2, 3), "out_in": (2, 3), "out_kernel": (1,), "out_in_height": (2,), "in_kernel": (0,)}


def center(net, names, mean):
    """Subtracts each output's mean over its inputs from the gradients; for convolutions [out, in, h, w] see Table 8."""
    for name, p in net.named_parameters():
        if name in names:
            means = p.grad.mean(MEAN_OVER[mean] if p.dim() == 4 else tuple(range(1, p.dim())), keepdim=True)
            p.grad -= means if means.numel() < p.numel() else 0  # the mean of one number is all that there is


def velocities(steps):
    """How far SGD with momentum moves along a constant gradient of one, at a rate of one."""
    way = velocity = 0.0
    for _ in range(steps):
        velocity = MOMENTUM * velocity + 1
        way += velocity
    return way


def plain_run(
    net, train_set, test_set, clients, *, method=None, alpha=1.0, local=(), server=(), mean="out", by_samples=False,
    server_lr=1.0, beta=0.0, crop=False, broken=None,
):  # fmt: skip
    """Trains ``net``; returns what each round's row should say."""
    (x, y), names = map(torch.from_numpy, train_set), [name for name, _ in net.named_parameters()]
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    kept = {k: copy.deepcopy(zeros) for k in range(N)}  # SCAFFOLD's c_k, FedDyn's h_k
    of_server = copy.deepcopy(zeros)  # c, or h
    server_optimizer, rows = torch.optim.SGD(net.parameters(), lr=server_lr, momentum=beta), []
    for t in range(ROUNDS):
        lr, start = LR * DECAY**t, {name: value.clone() for name, value in net.state_dict().items()}
        cohort = np.sort(draw("cohort", t).choice(N, COHORT, replace=False, shuffle=False)).tolist()
        deltas, losses, total = {}, [], copy.deepcopy(zeros)
        for k in cohort:
            w, seen, steps = copy.deepcopy(net).train(), [], 0
            optimizer = torch.optim.SGD(w.parameters(), lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
            torch.manual_seed(int(seeds("dropout", t, k).generate_state(1, np.uint64)[0] >> 1))
            drawn = draw("augment", t, k).integers(0, (5, 5, 2), size=(2 * -(-len(clients[k]) // BATCH), BATCH, 3))
            for epoch in draw("shuffle", t, k).permuted([clients[k]] * 2, axis=1):
                for batch in np.split(epoch, range(BATCH, len(epoch), BATCH)):
                    inputs = cropped(x[batch], drawn[steps, : len(batch)].tolist()) if crop else x[batch]
                    loss = F.cross_entropy(w(normalized(inputs)), y[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    for name, p in w.named_parameters():
                        if method == "scaffold":
                            p.grad += of_server[name] - kept[k][name]
                        if method == "feddyn":
                            p.grad += alpha * (p.detach() - start[name]) - kept[k][name]
                    center(w, local, mean)
                    nn.utils.clip_grad_norm_(w.parameters(), CLIP)
                    optimizer.step()
                    seen += [loss.item()] * len(batch)
                    steps += 1
            if k == broken:
                continue
            losses.append(np.mean(seen))
            deltas[k] = {name: value - start[name] for name, value in w.state_dict().items()}
            for name in names:
                if method == "scaffold":
                    change = -of_server[name] - deltas[k][name] / (velocities(steps) * lr)
                    kept[k][name] += change
                    total[name] += change
                if method == "feddyn":
                    kept[k][name] -= alpha * deltas[k][name]
                    total[name] -= alpha * deltas[k][name]
        shares = np.array([len(clients[k]) if by_samples else 1 for k in deltas], float)
        shares /= shares.sum()
        with torch.no_grad():
            for name in names:
                of_server[name] += total[name] / N
            for name, value in {**dict(net.named_parameters()), **dict(net.named_buffers())}.items():
                if not value.is_floating_point():
                    continue
                update = sum(share * deltas[k][name] for share, k in zip(shares, deltas, strict=True))
                if method == "feddyn":
                    update = update - of_server[name] / alpha
                if name in names:
                    value.grad = -update
                else:
                    value += update
            center(net, server, mean)
            server_optimizer.step()
            x_test, y_test = map(torch.from_numpy, test_set)
            logits = net.eval()(normalized(x_test))
        accuracy = (logits.argmax(1) == y_test).double().mean().item()
        rows.append([np.mean(losses), COHORT - len(deltas), accuracy, F.cross_entropy(logits, y_test).item()])
    return rows


CONV = ("model=cnn", "gc.boundary=fc")
WEIGHTS = ("conv1.weight", "conv2.weight", "conv3.weight", "fc.weight")
CASES = {
    "fedavg": (["gc=none"], {}),
    "by samples": (["gc=none", "aggregator.weighting=samples"], {"by_samples": True}),
    "gcfed": (["gc=gcfed"], {"local": ("fc1.weight",), "server": ("fc1.weight", "fc2.weight")}),
    "gcfed, server momentum": (
        ["gc=gcfed", "algorithm=fedavgm", "server.lr=0.7", "server.momentum=0.5"],
        {"local": ("fc1.weight",), "server": ("fc1.weight", "fc2.weight"), "server_lr": 0.7, "beta": 0.5},
    ),
    "scaffold": (["algorithm=scaffold", "gc=none"], {"method": "scaffold"}),
    "scaffold, gcfed, stack": (
        ["algorithm=scaffold", "gc=gcfed", "client.stack=2"],
        {"method": "scaffold", "local": ("fc1.weight",), "server": ("fc1.weight", "fc2.weight")},
    ),
    "feddyn, gcfed, stack": (
        ["algorithm=feddyn", "gc=gcfed", f"client.clip_norm={CLIP}", "methods.feddyn.alpha=0.3", "client.stack=3"],
        {"method": "feddyn", "alpha": 0.3, "local": ("fc1.weight",), "server": ("fc1.weight", "fc2.weight")},
    ),
    "crops and flips": (
        ["gc=none", "data.transform.crop_padding=2", "data.transform.flip=true", "client.stack=2"], {"crop": True},
    ),
    "global": ([*CONV, "gc=global"], {"server": WEIGHTS}),
    "local": ([*CONV, "gc=local", "gc.lam=0.5"], {"local": WEIGHTS[:2]}),
    **{
        f"gcfed, {mean}": ([*CONV, "gc=gcfed", f"gc.mean={mean}", f"client.stack={1 + i % 2}"],
                           {"local": WEIGHTS[:3], "server": WEIGHTS, "mean": mean})
        for i, mean in enumerate(MEAN_OVER)
    },
    "dropout": ([*CONV, "gc=gcfed"], {"local": WEIGHTS[:3], "server": WEIGHTS}),
    "scaffold, one left out": (
        ["algorithm=scaffold", "gc=none", "client.stack=2"], {"method": "scaffold", "broken": 2},
    ),
    "feddyn, one left out": (
        ["algorithm=feddyn", "gc=none", f"client.clip_norm={CLIP}", "methods.feddyn.alpha=0.3"],
        {"method": "feddyn", "alpha": 0.3, "broken": 2},
    ),
    "running statistics": ([*CONV, "gc=gcfed"], {"local": WEIGHTS[:3], "server": WEIGHTS}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_plain_loop(config, tmp_path, case):
    overrides, differs = CASES[case]
    parts = {"norm": case == "running statistics", "dropout": case == "dropout"}
    net = parts if "model=cnn" in overrides else None
    overrides = [*SETTING, *([] if net else ["model.hidden=[7]"]), *overrides]
    result, first = run(config, tmp_path, *overrides, net=net, broken=differs.get("broken"))
    data, saved = result.trainer.datamodule.dataset, np.load(tmp_path / "partition.npz")
    clients = np.split(saved["indices"], saved["offsets"][1:-1])
    assert max(map(len, clients)) > 2 * min(map(len, clients))
    limited = np.sort(draw("limit_train").choice(len(data.train.y), 70, replace=False))
    train_set, test_set = (data.train.x[limited], data.train.y[limited]), (data.test.x, data.test.y)
    rows = plain_run(first, train_set, test_set, clients, **differs)
    for name, value in result.module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, first.state_dict()[name], rtol=0, atol=1e-11, msg=name)
    written = pd.read_csv(tmp_path / "metrics.csv")[["train/loss", "train/nonfinite_clients", "test/acc", "test/loss"]]
    np.testing.assert_allclose(written, rows, rtol=0, atol=1e-6)  # a float32 mean of the test


def test_every_seed_draws_its_own(config, tmp_path):
    """The first weights and the partition; the same seed draws the same ones."""
    drawn = []
    for i, seed in enumerate((1, 2, 1)):
        result, first = run(config, tmp_path / str(i), "rounds=1", f"seed={seed}", "model.hidden=[7]", "client.steps=1")
        drawn.append([*(p.detach().numpy() for p in first.parameters() if p.dim() > 1),
                      result.trainer.datamodule.partition.indices, result.loop.server.draw(0).cohort])  # fmt: skip
    for one, two, one_again in zip(*drawn, strict=True):
        assert np.array_equal(one, one_again)
        assert not np.array_equal(one, two)
