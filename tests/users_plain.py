"""Runs of users' networks and losses, and the same in plain PyTorch.

A run trains for two rounds of three local steps with full batches.
"""

import copy

import numpy as np
import torch
import users_layers
import users_more
import users_networks
import users_states
from omegaconf import open_dict
from plain import draw, seeds
from torch import nn

from gcfed.run import train
from gcfed.tasks import Classification

ROUNDS = 2
STEPS = 3
LR = 0.2
MOMENTUM = 0.6
WEIGHT_DECAY = 0.01
SETTING = (
    "data=own",
    "data.dataset._target_=users_networks.load",
    "data.standardize=false",
    "partition=natural",
    "model=own",
    "participation.num_clients=null",
    "seed=4",
    f"rounds={ROUNDS}",
    f"client.steps={STEPS}",
    "client.batch_size=24",
    f"client.optimizer.lr={LR}",
    f"client.optimizer.momentum={MOMENTUM}",
    f"client.optimizer.weight_decay={WEIGHT_DECAY}",
    "logger=none",
)
IMAGES = ("data.transform.mean=[0.3]", "data.transform.std=[0.4]")
PLAIN = ("gc=none", "precision=64-true")


def find(name):
    modules = (users_networks, users_layers, users_states, users_more)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def composed(config, folder, name, *overrides, clients=1):
    """The config of a run of the network with this name."""
    net = find(name)
    images = IMAGES if getattr(net, "images", False) else ()
    words = (*SETTING, f"participation.per_round={clients}", *images, *overrides)
    cfg = config("model._target_=users_networks.Small", *words, folder=folder)
    with open_dict(cfg):
        cfg.model._target_ = f"{net.__module__}.{name}"
        cfg.data.dataset.clients = clients
        cfg.data.dataset.images = bool(images)
    return cfg


def run(config, folder, name, *overrides, clients=1, callback="", whole=True):
    """Runs the network with this name.

    Without checkpoints and metrics.csv (``whole=False``) it is a third faster.
    """
    cfg = composed(config, folder, name, *overrides, clients=clients)
    with open_dict(cfg):
        if not whole:
            cfg.callbacks = {}
            cfg.logger = {}
        if callback:
            cfg.callbacks.own = {"_target_": callback}
    return train(cfg)


def fresh(name):
    """The network at the start of a run."""
    torch.manual_seed(int(seeds("initialisation").generate_state(1, np.uint64)[0] >> 1) % 2**32)
    net = find(name)()
    if name in ("lazy", "Lazy"):
        net.eval()(torch.zeros(2, 36))
    return net if name == "DoubleInside" else net.double()


def centralised(net, name, t):
    """P t: subtracts each output's mean over its inputs, except for vectors and tensors [1, …]
    (tokens, positions).
    """
    layer = net.get_submodule(name.rpartition(".")[0])
    if t.dim() < 2 or len(t) == 1:
        return t
    if isinstance(layer, nn.ConvTranspose2d):
        t_GIOHW = t.unflatten(0, (layer.groups, -1))
        return (t_GIOHW - t_GIOHW.mean((1, 3, 4), keepdim=True)).flatten(0, 1)
    mean = t.mean([*range(1, t.dim())], keepdim=True)
    return t - mean if mean.numel() < t.numel() else t


def mean_loss(task, outputs, y):
    """The mean over the labels that are no padding."""
    real = task.real(y)
    return (task.losses(outputs, y) * real).sum() / real.sum()


def plain(make, x, y, clients, x_test, *, task=Classification, gc=False):
    """Federated averaging with a test after each round, and with GC-Fed if ``gc`` is true.

    With one client this is plain training with a new optimizer in each round.
    """
    net = make()
    own_task = task()
    for t in range(ROUNDS):
        start = copy.deepcopy(net.state_dict())
        ends = []
        for k, own in enumerate(clients):
            w, criterion = (net, own_task) if len(clients) == 1 else (make(), task())
            w.load_state_dict(start)
            optimizer = torch.optim.SGD(
                [p for p in w.train().parameters() if p.requires_grad],
                lr=LR,
                momentum=MOMENTUM,
                weight_decay=WEIGHT_DECAY,
            )
            torch.manual_seed(int(seeds("dropout", t, k).generate_state(1, np.uint64)[0] >> 1))
            torch.set_default_dtype(w.head.weight.dtype)  # as in the run
            for batch in draw("shuffle", t, k).permuted([own] * STEPS, axis=1):
                optimizer.zero_grad()
                mean_loss(criterion, w(x[batch]), y[batch]).backward()
                for n, p in w.named_parameters():
                    if gc and not n.startswith("head.") and p.grad is not None:
                        p.grad = centralised(w, n, p.grad)
                optimizer.step()
            torch.set_default_dtype(torch.float32)
            ends.append(copy.deepcopy(w.state_dict()))
        for n, v in net.state_dict().items():
            v.copy_(sum(end[n] for end in ends) / len(ends))
        for n, p in net.named_parameters():
            if gc and p.requires_grad:
                p.data.copy_(start[n] + centralised(net, n, p.detach() - start[n]))
        with torch.no_grad():
            net.eval()(x_test.clone())
    return net
