"""A client with infinite weights leaves nothing at the server or the client.

Methods do not change statistics.
"""

from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import Spy, random_federation, sgd, train_rounds, with_batch_norm
from plain_clients import Net

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
from gcfed.methods.server.fedexp import FedExP
from gcfed.methods.server.fedvarp import FedVARP
from gcfed.methods.sharpness.fedgloss import FedGloSS
from gcfed.methods.sharpness.fedsmoo import DualSam
from gcfed.methods.sharpness.sam import Sam
from gcfed.methods.subspace.fedsub import FedSub
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.clip_update import ClipUpdate
from gcfed.methods.upload.quantization import Quantization
from gcfed.participation.faults import Faults

FedLESAM = partial(Sam, direction="last_update")


class Diverges(ClientPart):
    """Makes the weights of some clients infinite in the second round."""

    order = Order.MEASURES

    def __init__(self, clients):
        self.clients = clients

    def prepare(self, stack, own, download):
        if download.round_index == 1:
            lost = np.isin(stack.clients, self.clients)
            next(iter(stack.full.values()))[lost] = torch.inf


class DropOut(Faults):
    """Lets these clients drop out of the second round."""

    lost: ClassVar = []

    def answers(self, clients, steps, round, seed, clock, message_bytes):
        return (round != 1) | ~np.isin(clients, self.lost), np.zeros(len(clients))


def diverged_and_dropped(monkeypatch, net, data, cls, clients, k):
    """The final weights of a run in which clients diverge, and of one in which they drop out.

    Both have one more round afterwards.
    """
    monkeypatch.setattr(DropOut, "lost", clients)
    ends = []
    lost = []
    for other, faults in (([Diverges(clients)], None), ([], DropOut(dropout=0.5))):
        end = train_rounds(
            net(),
            data,
            sgd(),
            rounds=3,
            cohort_of=4,
            k=k,
            methods=[cls(), *other],
            faults=faults,
            on_round=lambda round, row: lost.append(row["train/nonfinite_clients"]),
        )
        ends.append(end)
    assert lost == [0, len(clients), 0] + [0] * 3
    assert ends[0].isfinite().all()
    return ends


@pytest.mark.parametrize("clients", [[2], [0, 1, 2, 3]])
@pytest.mark.parametrize(
    "cls",
    [
        DualSam,
        FedAdamW,
        FedCM,
        FedCurv,
        FedDC,
        FedDyn,
        FedExP,
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
def test_clients_that_diverge_equal_clients_that_drop_out(monkeypatch, cls, clients):
    data = random_federation(sizes=(7, 12, 5, 9))
    ends = diverged_and_dropped(monkeypatch, Net, data, cls, clients, k=3)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_a_client_that_diverges_keeps_its_own_batch_norms(monkeypatch):
    data = random_federation(sizes=(8, 12, 4, 8))
    ends = diverged_and_dropped(monkeypatch, with_batch_norm, data, LocalNorm, [2], k=1)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


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
    net = with_batch_norm()
    watch = Statistics()

    def on_round(round, row):
        mean = torch.stack(watch.seen).mean(0)
        watch.seen = []
        torch.testing.assert_close(
            torch.cat([net[1].running_mean, net[1].running_var]), mean, rtol=1e-12, atol=1e-12
        )

    data = random_federation(sizes=(8, 12, 4, 8, 16))
    train_rounds(net, data, sgd(), rounds=2, methods=[cls(), watch], on_round=on_round)
