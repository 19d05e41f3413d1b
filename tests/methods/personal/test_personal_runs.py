"""Runs of personalised methods equal plain loops in float64, with clients that return rounds later.

The runs are stopped after some rounds, and continued with another number of processes.
"""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from plain import BATCH, DECAY, LR, SEED, WEIGHT_DECAY, draw, run

N = 9
COHORT = 3
STOP = 4
ROUNDS = 9
LAM = 0.7
SETTING = (
    "precision=64-true",
    f"seed={SEED}",
    "gc=none",
    "model.hidden=[7]",
    "partition.alpha=0.1",
    "data.limit_train=300",
    "data.limit_test=50",
    "data.client_test=0.3",
    "metrics=personal",
    "metrics.personal.every=2",
    "eval_every=2",
    f"participation.num_clients={N}",
    f"participation.per_round={COHORT}",
    "client.epochs=2",
    f"client.batch_size={BATCH}",
    f"client.lr_decay={DECAY}",
    "client.clip_norm=null",
    f"client.optimizer.lr={LR}",
    "client.optimizer.momentum=0.0",
    f"client.optimizer.weight_decay={WEIGHT_DECAY}",
)


def step(net, x, y, lr, *, names=None, towards=None):
    """A step of SGD on all parameters, or on those with these names.

    ``towards`` pulls the parameters to those of another network.
    """
    parameters = dict(net.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), [*parameters.values()])
    with torch.no_grad():
        for (name, weight), gradient in zip(parameters.items(), gradients, strict=True):
            gradient = gradient + WEIGHT_DECAY * weight
            if towards is not None:
                gradient = gradient + LAM * (weight - towards.get_parameter(name))
            if names is None or name in names:
                weight -= lr * gradient


class PlainDitto:
    overrides = ("algorithm=ditto", f"methods.ditto.lam={LAM}")
    withheld = ()

    def __init__(self):
        self.kept = {}

    def train(self, client, start, batches, lr):
        """The model that the client sends, and its own model."""
        sent = copy.deepcopy(start)
        own = copy.deepcopy(self.kept.get(client, start))
        for x, y in batches:
            step(own, x, y, lr, towards=start)
            step(sent, x, y, lr)
        self.kept[client] = own
        return sent, own


class PlainFedRep:
    overrides = ("algorithm=fedrep", "methods.fedrep.head_share=0.5")
    withheld = ("fc2.weight", "fc2.bias")

    def __init__(self):
        self.kept = {}

    def train(self, client, start, batches, lr):
        own = copy.deepcopy(start)
        own.load_state_dict(own.state_dict() | self.kept.get(client, {}))
        body = [name for name, _ in own.named_parameters() if name not in self.withheld]
        for number, (x, y) in enumerate(batches):
            in_head = number < len(batches) // 2
            step(own, x, y, lr, names=self.withheld if in_head else body)
        self.kept[client] = {name: own.get_parameter(name).detach() for name in self.withheld}
        return own, own


def batches_of(samples, client, t):
    """The indices of a client's batches in two epochs."""
    batches = []
    for epoch in draw("shuffle", t, client).permuted([samples] * 2, axis=1):
        batches += np.split(epoch, range(BATCH, len(epoch), BATCH))
    return batches


def accuracy(net, x, y):
    return (net(x).argmax(1) == y).double().mean().item()


def expected_rows(plain, net, data):
    """The rows of metrics. Trains the global model ``net``."""
    y = torch.from_numpy(data.labels)
    every = torch.arange(len(y))
    x, _ = data.fetch(every, None)
    rows = []
    trained = []
    for t in range(ROUNDS):
        start = copy.deepcopy(net)
        uploads = []
        accuracies = []
        drawn = draw("cohort", t).choice(N, COHORT, replace=False, shuffle=False)
        for client in np.sort(drawn).tolist():
            trained.append(client)
            samples = batches_of(data.client(client), client, t)
            batches = [(x[batch], y[batch]) for batch in samples]
            sent, own = plain.train(client, start, batches, LR * DECAY**t)
            uploads.append(sent)
            tests = data.tests_of_clients.client(client)
            if len(tests):
                models = (start, own)
                accuracies.append([accuracy(model, x[tests], y[tests]) for model in models])
        with torch.no_grad():
            for name, weight in net.named_parameters():
                if name not in plain.withheld:
                    weight.copy_(sum(sent.get_parameter(name) for sent in uploads) / COHORT)
        row = {}
        if (t + 1) % 2 == 0 or t + 1 == ROUNDS:
            for model, values in zip(("global", "local"), np.transpose(accuracies), strict=True):
                row[f"personal/{model}_acc"] = np.mean(values)
                row[f"personal/{model}_worst10"] = min(values)
                row[f"personal/{model}_std"] = np.std(values)
        rows.append(row)
    assert len(trained) > len({*trained}) + 5  # clients return
    return rows


@pytest.mark.parametrize("plain", [PlainDitto, PlainFedRep])
def test_a_continued_run_equals_the_plain_loop(plain, config, tmp_path):
    settings = (*SETTING, *plain.overrides)
    folder = tmp_path / "run"
    _, net = run(config, folder, *settings, f"rounds={STOP}", "trainer.devices=2")
    result, _ = run(config, folder, *settings, f"rounds={ROUNDS}", "ckpt_path=last")
    rows = pd.DataFrame(expected_rows(plain(), net, result.trainer.datamodule))
    for name, weight in net.named_parameters():
        found = result.model.get_parameter(name)
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-10)
    written = pd.read_csv(folder / "metrics.csv")[[*rows]]
    np.testing.assert_allclose(written, rows, rtol=0, atol=1e-9)
