"""Networks as people write them: a run equals ten lines of plain PyTorch, or gives a reason why it
does not.

Each network trains GC-Fed for two rounds of three local steps with full batches: with one client,
and with a stack of three clients (``client.stack=3``), which have 5, 8 and 11 samples.
"""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import users_layers
import users_networks
import users_states
from omegaconf import open_dict
from plain import draw, seeds
from torch import nn
from users_networks import SIZES, load, normalised

from gcfed.run import train

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecated and slow operations
EQUAL = "equal"  # equal to plain PyTorch; a refusal fails the test
ALONE = r"client\.stack=1"  # equal, or refused or trained one by one with this message

# The network, and the expected results of one client and of three in a stack. A pattern allows a
# refusal or other numbers if the error or the log matches it. None: not compared, for the reason in
# the comment. Networks that write no state and are equal in a stack need no run with one client.
# What is refused with one client is refused in a stack.
NETWORKS = {
    # inputs and outputs
    "InPlace": (None, EQUAL),
    "ViewAfterConv": (None, EQUAL),
    "GradientByInput": (EQUAL, ALONE),
    # buffers
    "RunningMean": (EQUAL, ALONE),
    "AssignedBuffer": (EQUAL, ALONE),
    "ChangesPlaces": (EQUAL, ALONE),
    "KeepsPrevious": (EQUAL, ALONE),
    "UnsavedBuffer": ("average", None),
    "BufferInList": (EQUAL, ALONE),
    "MeanForTests": (EQUAL, ALONE),
    "StepCounter": ("warmup", None),  # the engine decides how to combine the clients' counters
    "SeldomChanged": ("flag", ALONE),
    "WritesAnew": (EQUAL, EQUAL),
    "Grows": (r"the shape of rows", None),
    "TurningComplex": (r"phase.*view_as_real", "phase"),
    "IndexFirst": (None, EQUAL),
    # parameters used outside of their modules
    "SparseTable": ("sparse=False", None),
    "OwnParameters": ("requires_grad", None),
    "WeightInList": (EQUAL, ALONE),
    "Penalty": (EQUAL, ALONE),
    "ForwardHook": (EQUAL, ALONE),
    "GradientHook": (EQUAL, ALONE),
    "AccumulatedHook": (EQUAL, ALONE),
    "Scripted": (EQUAL, ALONE),
    "Checkpointed": (EQUAL, ALONE),
    "CheckpointedReentrant": (EQUAL, ALONE),
    "Clamped": (EQUAL, EQUAL),
    "Tied": (None, EQUAL),
    "SharedModule": (None, EQUAL),
    "TiedInForward": (EQUAL, ALONE),
    "LayerDrop": (EQUAL, ALONE),
    "EarlyExit": (EQUAL, ALONE),
    "Spare": (None, EQUAL),
    # state in attributes
    "Counter": (EQUAL, "calls"),  # the clients share the count
    "CountsInList": ("means", ALONE),
    "LastOutputs": ("outputs", "attribute"),
    "LastOutputsInPlace": ("attribute", None),
    "Lock": (None, EQUAL),
    "KeepsHidden": (EQUAL, ALONE),
    "Teacher": (EQUAL, ALONE),
    "TeacherByData": (EQUAL, ALONE),
    "TorchRandom": (EQUAL, None),  # a stack draws for all its clients at once
    "OwnGenerator": (EQUAL, "generator"),  # as Counter
    # initialised by their first batch
    "ActNorm": (EQUAL, ALONE),
    "CodeBook": (EQUAL, ALONE),
    "MeanOfFirst": (EQUAL, ALONE),
    "LayerOfForward": (r"makes the parameter late\.bias, late\.weight in forward", None),
    # torch's layers
    "batch_norm": (EQUAL, ALONE),
    "batch_norm_cumulative": (EQUAL, None),  # as StepCounter
    "OwnBatchNorm": (EQUAL, ALONE),
    "group_norm": (None, EQUAL),
    "instance_norm": (None, EQUAL),
    "weight_normalised": (None, EQUAL),
    # the mean of the unit vectors is repaired (test_users_runs.py)
    "spectrally_normalised": (EQUAL, None),
    "transposed": (None, EQUAL),
    "sequence_first": (EQUAL, ALONE),  # its layer has the batch on axis 1, so samples meet
    "TwoAndThreeAxes": (None, EQUAL),
    "VisionTransformer": (None, EQUAL),
    "Recurrent": (EQUAL, ALONE),
    "lazy": (None, EQUAL),
    "dropout": (EQUAL, None),  # as TorchRandom
    "DoubleInside": (None, EQUAL),
}
ROUNDS, STEPS, LR, MOMENTUM, WEIGHT_DECAY = 2, 3, 0.2, 0.6, 0.01
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
COMPOSED = {}  # configs, by their overrides


def find(name):
    modules = (users_networks, users_layers, users_states)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def run(config, folder, name, *overrides, clients=1, callback="", whole=True):
    """Runs the network with this name.

    Without checkpoints and metrics.csv (``whole=False``) it is a third faster.
    """
    net = find(name)
    images = IMAGES if getattr(net, "images", False) else ()
    words = (*SETTING, f"participation.per_round={clients}", *images, *overrides)
    if words not in COMPOSED:
        COMPOSED[words] = config("model._target_=users_networks.Small", *words)
    cfg = copy.deepcopy(COMPOSED[words])
    with open_dict(cfg):
        cfg.model._target_, cfg.paths.output_dir = f"{net.__module__}.{name}", str(folder)
        cfg.data.dataset.clients, cfg.data.dataset.images = clients, bool(images)
        if not whole:
            cfg.callbacks, cfg.logger = {}, {}
        if callback:
            cfg.callbacks.own = {"_target_": callback}
    return train(cfg)


# -------------------------------------------------------------------------------------------- the
# same in plain PyTorch
def fresh(name):
    torch.manual_seed(int(seeds("initialisation").generate_state(1, np.uint64)[0] >> 1) % 2**32)
    net = find(name)()
    if name in ("lazy", "Lazy"):
        net.eval()(torch.zeros(2, 36))
    return net if name == "DoubleInside" else net.double()


def centralised(net, name, t):
    """P t: subtracts each output's mean over its inputs, except for vectors and tensors [1, …]
    (tokens, positions).
    """
    of_outputs = int(isinstance(net.get_submodule(name.rpartition(".")[0]), nn.ConvTranspose2d))
    mean = t.mean([axis for axis in range(t.dim()) if axis != of_outputs] or 0, keepdim=True)
    return t - mean if t.dim() > 1 and len(t) > 1 and mean.numel() < t.numel() else t


def plain(name, x, y, clients):
    """Federated averaging.

    With one client this is plain training with a new optimizer in each round.
    """
    net = fresh(name)
    for t in range(ROUNDS):
        start, ends = {n: v.clone() for n, v in net.state_dict().items()}, []
        for k, own in enumerate(clients):
            w = net if len(clients) == 1 else fresh(name)
            w.load_state_dict(start)
            optimizer = torch.optim.SGD(
                w.train().parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
            )
            torch.manual_seed(int(seeds("dropout", t, k).generate_state(1, np.uint64)[0] >> 1))
            for batch in draw("shuffle", t, k).permuted([own] * STEPS, axis=1):
                optimizer.zero_grad()
                F.cross_entropy(w(x[batch]), y[batch]).backward()
                for n, p in w.named_parameters():
                    if not n.startswith("head.") and p.grad is not None:
                        p.grad = centralised(w, n, p.grad)
                optimizer.step()
            ends.append({n: v.clone() for n, v in w.state_dict().items()})
        for n, v in net.state_dict().items():
            v.copy_(sum(end[n] for end in ends) / len(ends))
        for n, p in net.named_parameters():
            if p.requires_grad:
                p.data.copy_(start[n] + centralised(net, n, p.detach() - start[n]))
    return net.eval()


def compare(result, name, clients):
    """Weights, buffers and the last test equal those of the plain loop."""
    dtype, atol = (torch.float32, 1e-6) if name == "DoubleInside" else (torch.float64, 1e-10)
    data = load(clients, images=getattr(find(name), "images", False))
    x, x_test = (torch.from_numpy(data[key]).to(dtype) for key in ("x", "x_test"))
    x, x_test = (normalised(t) if t.dim() == 4 else t for t in (x, x_test))
    y, y_test = (torch.from_numpy(data[key]) for key in ("y", "y_test"))
    net = plain(name, x, y, np.split(np.arange(len(y)), np.cumsum(SIZES[clients])[:-1]))
    logits, state = net(x_test), result.module.net.state_dict()
    assert state.keys() == net.state_dict().keys()
    for n, value in net.state_dict().items():
        if value.is_floating_point() or clients == 1:
            torch.testing.assert_close(
                state[n], value, rtol=0, atol=atol, msg=lambda msg, n=n: f"{n}: {msg}"
            )
    accuracy = (logits.argmax(1) == y_test).double().mean().item()
    loss = F.cross_entropy(logits, y_test).item()
    assert [result.metrics["test/acc"], result.metrics["test/loss"]] == pytest.approx(
        [accuracy, loss], abs=10 * atol
    )


@pytest.mark.parametrize(
    ("name", "clients"),
    [(n, c) for n, both in NETWORKS.items() for c, e in zip((1, 3), both, strict=True) if e],
)
def test_a_network_trains_as_with_plain_pytorch(config, tmp_path, caplog, name, clients):
    expected, said = NETWORKS[name][clients > 1], ""
    with caplog.at_level("INFO"):
        try:
            words = (
                "gc=gcfed",
                "gc.boundary=head",
                f"precision={32 if name == 'DoubleInside' else 64}-true",
            )
            words += (f"client.stack={clients}",)
            result = run(config, tmp_path / "run", name, *words, clients=clients, whole=False)
        except ValueError as error:
            result, said = None, str(error)
    named = expected != EQUAL and re.search(expected, f"{said} {caplog.text}")
    assert result or named, said
    if result and (not named or expected == ALONE):
        compare(result, name, clients)


@pytest.mark.parametrize("name", ["TwoInputs", "TupleOutput"])
def test_a_network_that_cannot_be_trained_is_refused_with_a_wrapper(config, tmp_path, name):
    with pytest.raises(ValueError, match=rf"(?s){name}.*forward"):
        run(config, tmp_path, name, *PLAIN)
