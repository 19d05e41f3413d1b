"""What each method asks of the rest of the algorithm: the settings that it refuses, by its own name, and no others."""

import re
from functools import partial

import pytest
import torch
from harness import PLAIN_SERVER, make_net, make_setup, random_federation, sgd

from gcfed.aggregators.coordinates import Median
from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.solver import LocalSolver
from gcfed.federated.store import ClientStores
from gcfed.methods.fedcm import FedCM
from gcfed.methods.fedcurv import FedCurv
from gcfed.methods.feddc import FedDC
from gcfed.methods.feddecorr import FedDecorr
from gcfed.methods.feddyn import FedDyn
from gcfed.methods.fedgc import FedGC
from gcfed.methods.fedmlb import FedMLB
from gcfed.methods.fedsub import FedSub
from gcfed.methods.fedvarp import FedVARP
from gcfed.methods.moon import Moon
from gcfed.methods.quantization import Quantization
from gcfed.methods.scaffold import Scaffold
from gcfed.methods.ssf import SSF
from gcfed.models.mlp import MLP

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
    "rounded": ({"stores": ClientStores("bfloat16")}, "client_store.dtype=null"),
}
NET = MLP(input_shape=(6,), num_classes=4, hidden=(5,))
SERVER = "server decay yogi"
REFUSED = {
    FedGC: "adam median", FedDC: f"adam momentum samples median half {SERVER} quantized rounded",
    FedCM: "adam momentum samples median", FedVARP: "samples median",
    FedDyn: f"samples median half {SERVER} rounded", Scaffold: "adam samples quantized", FedCurv: "median quantized",
    SSF: f"adam momentum samples median {SERVER} rounded", FedSub: f"adam momentum median {SERVER} rounded",
    FedDecorr: "layers", FedMLB: "layers", Moon: "layers",
}  # fmt: skip


@pytest.mark.parametrize("cls", REFUSED)
def test_a_method_takes_and_refuses(cls, tmp_path):
    for name, (changes, message) in SETTINGS.items():
        parts = {"solver": sgd(), "server": PLAIN_SERVER, "stores": ClientStores(folder=tmp_path), **changes}
        method, net = cls(), parts.pop("net", NET)
        setup = make_setup(net, data=random_federation(), **parts | {"methods": [method, *parts.get("methods", ())]})
        if name in REFUSED[cls].split():
            with pytest.raises(ValueError, match=rf"^{cls.__name__} .*{re.escape(message)}"):
                method.meet(setup)
        else:
            method.meet(setup)
