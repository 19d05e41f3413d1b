"""FedAvg as a plain loop.

Each case of a test changes one setting and compares the loop with ``train(cfg)`` in float64.

The plain loop uses no code of the engine. It reads the partition that the run wrote, starts from
the run's first weights, and repeats the draws of cohorts and batches. This also fixes the streams
of random numbers.
"""

import copy
import itertools
import zlib

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from harness import Spy
from lightning.pytorch import Callback
from omegaconf import open_dict
from torch import nn

from gcfed.run import train

SEED = 4
ROUNDS = 3
BATCH = 8
LR = 0.2
DECAY = 0.5
WEIGHT_DECAY = 0.05
MOMENTUM = 0.6
CLIP = 0.4
SETTING = (
    "precision=64-true",
    f"seed={SEED}",
    f"rounds={ROUNDS}",
    "partition.alpha=0.1",
    "data.eval_batch_size=100",
    "client.epochs=2",
    f"client.batch_size={BATCH}",
    f"client.lr_decay={DECAY}",
    f"client.clip_norm={CLIP}",
    f"client.optimizer.lr={LR}",
    f"client.optimizer.momentum={MOMENTUM}",
    f"client.optimizer.weight_decay={WEIGHT_DECAY}",
)


class Net(nn.Module):
    """One- and two-dimensional convolutions and linear layers.

    ``special`` adds running statistics and dropout.
    """

    def __init__(self, special=False):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3, stride=2)
        self.conv2 = nn.Conv2d(2, 3, (3, 2))
        self.norm = nn.BatchNorm2d(3) if special else nn.Identity()
        self.conv3 = nn.Conv1d(3, 2, 2)
        self.fc = nn.Linear(2, 10)
        self.dropout = nn.Dropout(0.3) if special else nn.Identity()

    def forward(self, x):
        h = self.norm(self.conv2(self.conv1(x).tanh())).tanh()
        return self.fc(self.conv3(self.dropout(h).flatten(2)).tanh().flatten(1))


class FirstWeights(Callback):
    """Keeps a copy of the network at the start of the run."""

    def on_fit_start(self, trainer, pl_module):
        self.net = copy.deepcopy(pl_module.net)


class Breaks(Spy):
    """One client sends a number that is not finite."""

    def __init__(self, client):
        self.client = client

    def send(self, upload, own, download):
        next(iter(upload.delta.values()))[upload.clients == self.client] = float("inf")


def run(config, folder, *overrides, net=None, broken=None):
    """A run's result and its first network."""
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
    """The seed of a purpose's stream. The project promises it, so that others can repeat a run."""
    return np.random.SeedSequence(SEED, spawn_key=(zlib.crc32(purpose.encode()), *ids))


def draw(purpose, *ids):
    return np.random.Generator(np.random.Philox(seeds(purpose, *ids)))


def normalized(x):
    return (x.double() / 255 - 0.3) / 0.37


class Plain:
    """FedAvg. ``self.net`` is the global model, ``self.rows`` are the expected rows of metrics."""

    overrides: tuple[str, ...] = ()
    model: dict | None = None
    n = 8
    cohort = 4
    extra = 0
    last = "keep"
    nesterov = False
    skewed = True
    samples = 120
    broken = None
    atol = 1e-9

    def __init__(self, net, x, y, clients):
        self.net = net
        self.x = x
        self.y = y.clone()
        self.clients = clients
        self.names = [name for name, _ in net.named_parameters()]
        self.rows = []
        self.state = {}
        self.begin()

    inputs = staticmethod(normalized)

    def begin(self): ...

    def drawn(self, t):
        many = self.cohort + self.extra
        return np.sort(
            draw("cohort", t).choice(self.n, many, replace=False, shuffle=False)
        ).tolist()

    def came(self, t, drawn):
        """The clients whose uploads count, with their largest numbers of steps."""
        return dict.fromkeys(drawn, 10**6)

    def batches(self, k, t):
        own = self.clients[k]
        if self.last == "wrap":
            own = np.resize(own, -(-len(own) // BATCH) * BATCH)
        for epoch in draw("shuffle", t, k).permuted([own] * 2, axis=1):
            parts = np.split(epoch, range(BATCH, len(epoch), BATCH))
            yield from (
                parts[:-1]
                if self.last == "drop" and len(parts) > 1 and len(parts[-1]) < BATCH
                else parts
            )

    def objective(self, w, x, y, k):
        """The task's loss, and the objective whose gradient is used."""
        loss = F.cross_entropy(w(x), y)
        return loss, loss

    def backward(self, w, x, y, k):
        loss, objective = self.objective(w, x, y, k)
        objective.backward()
        return loss

    def start(self, w, k): ...

    def correct(self, w, k):
        """Changes the gradients of a local step."""

    def images(self, k, step, batch):
        """The training samples of a local step."""
        return self.x[batch]

    def rate(self, t):
        """The clients' learning rate in a round."""
        return LR * DECAY**t

    def num_labels(self, y):
        """The number of labels over which the loss of a batch is a mean; -100 is padding."""
        return int((y >= 0).sum())

    def sent(self, t, deltas): ...

    def server_step(self, deltas):
        state = self.net.state_dict()
        for name in next(iter(deltas.values()), {}):
            state[name] += sum(delta[name] for delta in deltas.values()) / len(deltas)

    def round(self, t):
        self.t = t
        self.lr = self.rate(t)
        drawn = self.drawn(t)
        came = self.came(t, drawn)
        deltas = {}
        losses = []
        steps = {}
        samples = 0
        for k, most in came.items():
            w = copy.deepcopy(self.net).train()
            self.start(w, k)
            optimizer = torch.optim.SGD(
                w.parameters(),
                lr=self.lr,
                momentum=MOMENTUM,
                weight_decay=WEIGHT_DECAY,
                nesterov=self.nesterov,
            )
            torch.manual_seed(int(seeds("dropout", t, k).generate_state(1, np.uint64)[0] >> 1))
            seen = []
            steps[k] = 0
            for batch in itertools.islice(self.batches(k, t), most):
                optimizer.zero_grad()
                x = self.inputs(self.images(k, steps[k], batch))
                y = self.y[batch]
                seen += [self.backward(w, x, y, k).item()] * self.num_labels(y)
                samples += len(batch)
                self.correct(w, k)
                nn.utils.clip_grad_norm_(w.parameters(), CLIP)
                optimizer.step()
                steps[k] += 1
            losses.append(np.mean(seen))
            before = self.net.state_dict()
            deltas[k] = {
                n: v - before[n] for n, v in w.state_dict().items() if v.is_floating_point()
            }
        self.steps = steps
        self.row = {
            "train/loss": np.mean(losses) if losses else np.nan,
            "train/clients": len(came),
            "train/steps": sum(steps.values()),
            "train/samples": samples,
        }
        self.sent(t, deltas)
        self.server_step(deltas)
        self.rows.append(self.row)


def check(case, config, folder):
    """Runs ``train(cfg)`` and the plain loop of a case. Their weights and rows must be equal."""
    overrides = (
        *(word for word in SETTING if "alpha" not in word or case.skewed),
        f"participation.num_clients={case.n}",
        f"participation.per_round={case.cohort}",
        "gc=none",
        f"data.limit_train={case.samples}",
        "data.limit_test=20",
        *(() if case.model else ["model.hidden=[7]"]),
        *case.overrides,
    )
    result, first = run(config, folder, *overrides, net=case.model, broken=case.broken)
    data = result.trainer.datamodule.dataset
    saved = np.load(folder / "partition.npz")
    few = case.samples
    every = data.train
    limited = (
        np.sort(draw("limit_train").choice(len(every), few, replace=False))
        if len(every) > few
        else slice(None)
    )
    x, y = (torch.from_numpy(values[limited]) for values in (every.x, every.y))
    plain = case(first, x, y, np.split(saved["indices"], saved["offsets"][1:-1]))
    plain.test = data.test
    for t in range(result.loop.rounds):
        plain.round(t)
    for name, value in result.module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(
                value, plain.net.state_dict()[name], rtol=0, atol=1e-11, msg=name
            )
    written = pd.read_csv(folder / "metrics.csv")[list(plain.rows[0])]
    np.testing.assert_allclose(written, pd.DataFrame(plain.rows), rtol=0, atol=case.atol)
