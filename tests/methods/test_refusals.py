"""Each method refuses, by its own name, exactly the settings that it does not support."""

import re
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import refuses
from harness import (
    PLAIN_SERVER,
    join_run,
    make_net,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
)

from gcfed.aggregators.coordinates import Median
from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver
from gcfed.methods.correction.feddc import FedDC
from gcfed.methods.correction.feddyn import FedDyn
from gcfed.methods.correction.fedgc import FedGC
from gcfed.methods.correction.scaffold import MeanVariate, Scaffold
from gcfed.methods.momentum.fedadamw import FedAdamW, MeanMoment
from gcfed.methods.momentum.fedcm import FedCM
from gcfed.methods.momentum.fedmuon import FedMuon, MeanMomentum
from gcfed.methods.objective.fedcurv import FedCurv
from gcfed.methods.objective.feddecorr import FedDecorr
from gcfed.methods.objective.fedlc import FedLC
from gcfed.methods.objective.fedmlb import FedMLB
from gcfed.methods.objective.moon import Moon
from gcfed.methods.server.fedexp import FedExP
from gcfed.methods.server.fednova import FedNova
from gcfed.methods.server.fedvarp import FedVARP
from gcfed.methods.sharpness.fedgloss import FedGloSS
from gcfed.methods.sharpness.fedsmoo import CommonMove, DualSam
from gcfed.methods.sharpness.fedwmsam import FedWMSAM
from gcfed.methods.subspace.fedsub import FedSub
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.quantization import Quantization
from gcfed.models.mlp import MLP
from gcfed.models.resnet import ResNetCIFAR
from gcfed.tasks import Classification

SETTINGS = {
    "adam": ({"solver": LocalSolver(partial(torch.optim.Adam, lr=0.1))}, "client=sgd, not Adam"),
    "momentum": ({"solver": sgd(momentum=0.9)}, "client.optimizer.momentum=0"),
    "samples": ({"aggregator": MeanAggregator("samples")}, "aggregator.weighting=uniform"),
    "median": ({"aggregator": Median()}, "aggregator=mean, not Median"),
    "half": ({"server": partial(torch.optim.SGD, lr=0.5)}, "server=sgd with server.lr=1:"),
    "server": ({"server": partial(torch.optim.SGD, lr=1.0, momentum=0.9)}, "server=sgd"),
    "decay": ({"server": partial(torch.optim.SGD, lr=1.0, weight_decay=0.1)}, "server=sgd"),
    "yogi": ({"server": partial(torch.optim.Adam, lr=1.0)}, "server=sgd"),
    "quantized": ({"methods": [Quantization(8)]}, "quantization=none"),
    "layers": ({"net": make_net()}, "model=Sequential has no "),
}
PLAIN = sgd()
NET = MLP(input_shape=(6,), num_classes=4, hidden=(5,))
LINEAR = MLP(input_shape=(6,), num_classes=4, hidden=())
SERVER = "server decay yogi"
REFUSED = {
    FedGC: "adam median",
    FedDC: f"adam momentum samples median half {SERVER} quantized",
    FedCM: "adam momentum samples median",
    FedVARP: "samples median",
    FedDyn: f"samples median half {SERVER}",
    Scaffold: "adam samples quantized",
    FedCurv: "median quantized",
    SSF: f"adam momentum samples median {SERVER}",
    FedSub: f"adam momentum median {SERVER}",
    FedNova: "adam samples",
    FedExP: f"samples median half {SERVER}",
    FedGloSS: f"samples median half {SERVER}",
    FedMuon: "adam momentum samples median quantized",
    FedWMSAM: "adam momentum samples median quantized",
    FedAdamW: "adam momentum samples median quantized",
    DualSam: "samples quantized",
    FedDecorr: "layers",
    FedMLB: "layers",
    Moon: "layers",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_a_method_accepts_and_refuses_settings(cls, tmp_path):
    for name, (changes, message) in SETTINGS.items():
        parts = {
            "solver": PLAIN,
            "server": PLAIN_SERVER,
            "stores": ClientStores(folder=tmp_path),
            **changes,
        }
        method = cls()
        net = parts.pop("net", NET)
        setup = make_setup(
            net,
            data=random_federation(),
            **parts | {"methods": [method, *parts.get("methods", ())]},
        )
        if name in REFUSED[cls].split():
            with refuses(rf"^{cls.__name__} .*{re.escape(message)}"):
                join_run(method, setup)
        else:
            join_run(method, setup)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (MeanVariate(), "c is the plain mean"),
        (CommonMove(rho=0.1), "s follows the plain mean"),
        (MeanMomentum("fedmuon"), "M̄ is the plain mean"),
        (MeanMoment("fedadamw"), "v̄ is the plain mean"),
    ],
)
def test_shared_tensors_are_refused_for_a_reason_of_their_own(part, reason):
    weighted = MeanAggregator("samples")
    setup = make_setup(NET, data=random_federation(), aggregator=weighted, methods=[part])
    with refuses(reason):
        join_run(part, setup)


@pytest.mark.parametrize("cls", [FedDecorr, Moon])
@pytest.mark.parametrize("frozen", [False, True])
def test_features_without_a_trained_weight_are_refused(cls, frozen):
    """A loss on such features has no gradient, so the run would be FedAvg with another name."""
    net = deepcopy(NET if frozen else LINEAR).double()
    net.requires_grad_(not frozen)
    net.fc2.requires_grad_() if frozen else None
    with refuses(rf"^{cls.__name__} .*no trained weight"):
        train_rounds(net, rounds=1, methods=[cls()])


def test_two_calls_of_a_network_per_step_are_refused_if_it_counts_them():
    batch, group = (
        ResNetCIFAR(input_shape=(3, 8, 8), num_classes=4, depth=8, norm=n)
        for n in ("batch", "group")
    )
    join_run(FedMLB(), make_setup(batch, methods=[FedMLB()]))
    join_run(FedMLB(), make_setup(group, methods=[FedMLB(), Moon()]))
    with refuses(r"FedMLB and Moon call model=ResNetCIFAR twice a step"):
        join_run(FedMLB(), make_setup(batch, methods=[FedMLB(), Moon()]))


def test_a_loss_that_is_infinite_for_missing_classes_is_refused():
    class Smoothed(Classification):
        def losses(self, outputs, y):
            return F.cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)

    run = {"data": random_federation(), "task": Smoothed()}
    join_run(FedLC(tau=0.0), make_setup(NET, **run))
    with refuses(r"^FedLC .*task=Smoothed is then infinite"):
        join_run(FedLC(), make_setup(NET, **run))
