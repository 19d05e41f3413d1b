"""A client whose weights become infinite: nothing of it stays with the server or with the client."""

import pytest
import torch
from harness import random_federation, sgd, train_rounds
from plain_clients import Net

from gcfed.federated.faults import Faults
from gcfed.federated.method import ClientPart, Order
from gcfed.methods.fedcm import FedCM
from gcfed.methods.fedcurv import FedCurv
from gcfed.methods.feddc import FedDC
from gcfed.methods.feddyn import FedDyn
from gcfed.methods.fedgc import FedGC
from gcfed.methods.fedsub import FedSub
from gcfed.methods.fedvarp import FedVARP
from gcfed.methods.moon import Moon
from gcfed.methods.scaffold import Scaffold
from gcfed.methods.ssf import SSF


class Diverges(ClientPart):
    """A client whose weights become infinite in the second round."""

    order = Order.MEASURES

    def on_clients_start(self, stack, download):
        if download.round == 1:
            next(iter(stack.full.values()))[stack.clients == 2] = torch.inf


class DropsOut(Faults):
    """The same client drops out of that round."""

    def survivors(self, drawn, steps, round, seed):
        return drawn[(round != 1) | (drawn != 2)]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("cls", [FedCM, FedCurv, FedDC, FedDyn, FedGC, FedSub, FedVARP, Moon, Scaffold, SSF])
def test_who_diverges_is_as_one_who_drops_out(cls, k):
    """Its next round is as it would have been."""
    runs, lost = [], []
    for other, faults in (([Diverges()], None), ([], DropsOut())):
        runs.append(train_rounds(
            Net(), random_federation(sizes=(7, 12, 5, 9)), sgd(), rounds=3, cohort_of=4, k=k, methods=[cls(), *other],
            faults=faults, on_round=lambda round, row: lost.append(row["train/nonfinite_clients"]),
        ))  # fmt: skip
    assert lost == [0, 1, 0] + [0] * 3
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)
    assert runs[0].isfinite().all()
