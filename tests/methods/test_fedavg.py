"""Methods equal FedAvg bit for bit with strength 0, in a first round, or in a first step."""

from functools import cache, partial

import pytest
import torch
from harness import assert_near, random_federation, sgd, train_rounds
from plain_clients import Net, federation

from gcfed.methods.correction.fedgc import FedGC
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.momentum.fedcm import FedCM
from gcfed.methods.objective.fedcurv import FedCurv
from gcfed.methods.objective.feddecorr import FedDecorr
from gcfed.methods.objective.fedlc import FedLC
from gcfed.methods.objective.fedmlb import FedMLB
from gcfed.methods.objective.fedntd import FedNTD
from gcfed.methods.objective.fedreg import FedReg
from gcfed.methods.objective.moon import Moon
from gcfed.methods.objective.proximal import Proximal
from gcfed.methods.server.fedvarp import FedVARP
from gcfed.methods.sharpness.fedsol import FedSol
from gcfed.methods.sharpness.sam import Sam
from gcfed.methods.subspace.fedsub import FedSub
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.topk import TopK


@cache
def fedavg(**run):
    return train_rounds(Net(), federation(), sgd(), k=2, **run)


@pytest.mark.parametrize(
    "method",
    [
        FedCM(1.0),
        FedCurv(0.0),
        FedDecorr(0.0),
        FedGC(cgc=False, sgc=False),
        FedLC(0.0),
        FedMLB(0.0, 0.0),
        FedNTD(0.0),
        FedReg(1.0, pseudo=False, perturbed=False),
        FedSol(0.0),
        Moon(0.0),
        Proximal(0.0),
        Sam(0.0),
        Sam(0.0, direction="last_update"),
        TopK(1.0),
    ],
    ids=lambda method: type(method).__name__,
)
def test_strength_0_equals_fedavg(method):
    found = train_rounds(Net(), federation(), sgd(), rounds=2, methods=[method], k=2)
    assert torch.equal(found, fedavg(rounds=2))


LESAM = partial(Sam, direction="last_update")


@pytest.mark.parametrize("cls", [FedCurv, FedVARP, Moon, Scaffold, LESAM])
def test_a_first_round_equals_fedavg(cls):
    found = train_rounds(Net(), federation(), sgd(), rounds=1, methods=[cls()], k=2)
    assert torch.equal(found, fedavg(rounds=1))


def test_a_first_step_of_one_client_equals_fedavg():
    run = partial(
        train_rounds, data=random_federation(), solver=sgd(steps=1), rounds=1, cohort_of=1
    )
    expected = run(Net())
    for method in (FedGC(), FedSol(), FedSol(adaptive=False), Proximal()):
        assert torch.equal(run(Net(), methods=[method]), expected), method


def test_ssf_in_the_whole_space_equals_scaffold_and_a_first_round_has_no_correction():
    run = partial(train_rounds, data=federation(), k=2)
    decayed = {"solver": sgd(weight_decay=0.01), "rounds": 3}
    whole, scaffold = (
        run(Net(), methods=[method], **decayed) for method in (SSF(ratio=1.0), Scaffold())
    )
    assert_near(whole, scaffold, 1e-9)
    first = [run(Net(), methods=[cls(ratio=0.4)], solver=sgd(), rounds=1) for cls in (SSF, FedSub)]
    assert torch.equal(*first)
