"""A client with infinite weights leaves nothing at the server or the client.

Methods do not change statistics.
"""

from functools import partial

import numpy as np
import pytest
import torch
from harness import Spy, random_federation, sgd, train_rounds, with_batch_norm
from plain_clients import Net

from gcfed.data.faults import Faults
from gcfed.federated.parts import ClientPart, Order
from gcfed.methods.correction.feddc import FedDC
from gcfed.methods.correction.feddyn import FedDyn
from gcfed.methods.correction.fedgc import FedGC
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.momentum.fedadamw import FedAdamW
from gcfed.methods.momentum.fedcm import FedCM
from gcfed.methods.momentum.fedmuon import FedMuon
from gcfed.methods.objective.fedcurv import FedCurv
from gcfed.methods.objective.moon import Moon
from gcfed.methods.personal.local_norm import LocalNorm
from gcfed.methods.server.fedvarp import FedVARP
from gcfed.methods.sharpness.fedgloss import FedGloSS
from gcfed.methods.sharpness.fedsmoo import DualSam
from gcfed.methods.sharpness.sam import Sam
from gcfed.methods.subspace.fedsub import FedSub
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.clip_update import ClipUpdate
from gcfed.methods.upload.quantization import Quantization

FedLESAM = partial(Sam, direction="last_update")


class Diverges(ClientPart):
    """Makes the weights of client 2 infinite in the second round."""

    order = Order.MEASURES

    def prepare(self, stack, own, download):
        if download.round == 1:
            next(iter(stack.full.values()))[stack.clients == 2] = torch.inf


class DropsOut(Faults):
    """Lets client 2 drop out of the second round."""

    def answers(self, clients, steps, round, seed, clock, message_bytes):
        return (round != 1) | (clients != 2), np.zeros(len(clients))


@pytest.mark.parametrize(
    "cls",
    [
        DualSam,
        FedAdamW,
        FedCM,
        FedCurv,
        FedDC,
        FedDyn,
        FedGC,
        FedGloSS,
        FedLESAM,
        FedMuon,
        FedSub,
        FedVARP,
        Moon,
        Scaffold,
        SSF,
    ],
)
def test_a_client_that_diverges_equals_one_that_drops_out(cls):
    """Its next round is the same in both cases."""
    runs, lost = [], []
    for other, faults in (([Diverges()], None), ([], DropsOut(dropout=0.5))):
        runs.append(
            train_rounds(
                Net(),
                random_federation(sizes=(7, 12, 5, 9)),
                sgd(),
                rounds=3,
                cohort_of=4,
                k=3,
                methods=[cls(), *other],
                faults=faults,
                on_round=lambda round, row: lost.append(row["train/nonfinite_clients"]),
            )
        )
    assert lost == [0, 1, 0] + [0] * 3
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)
    assert runs[0].isfinite().all()


def test_a_client_that_diverges_keeps_its_own_batch_norms():
    data, runs = random_federation(sizes=(8, 12, 4, 8)), []
    for other, faults in (([Diverges()], None), ([], DropsOut(dropout=0.5))):
        methods = [LocalNorm(), *other]
        runs.append(
            train_rounds(
                with_batch_norm(),
                data,
                sgd(),
                rounds=3,
                cohort_of=4,
                methods=methods,
                faults=faults,
            )
        )
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


class Statistics(Spy):
    """Records each client's running statistics at the end of its training."""

    def __init__(self):
        self.seen = []

    def on_clients_end(self, stack, download):
        self.seen += [
            torch.cat([t[i] for n, t in stack.full.items() if "running" in n])
            for i in range(len(stack))
        ]


@pytest.mark.parametrize(
    "cls",
    [
        ClipUpdate,
        FedCM,
        FedCurv,
        FedDC,
        FedDyn,
        FedGC,
        FedSub,
        FedVARP,
        Quantization,
        Scaffold,
        SSF,
    ],
)
def test_running_statistics_are_the_cohorts_mean_with_every_method(cls):
    """Methods correct, keep or project only trained weights."""
    net, watch = with_batch_norm(), Statistics()

    def on_round(round, row):
        mean, watch.seen = torch.stack(watch.seen).mean(0), []
        torch.testing.assert_close(
            torch.cat([net[1].running_mean, net[1].running_var]), mean, rtol=1e-12, atol=1e-12
        )

    data = random_federation(sizes=(8, 12, 4, 8, 16))
    train_rounds(net, data, sgd(), rounds=2, methods=[cls(), watch], on_round=on_round)
