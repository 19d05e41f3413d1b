"""Methods against client drift reach the optimum of all clients, which FedAvg misses."""

from functools import partial

import pytest
from harness import sgd, train_rounds
from plain_reference import optimum, skewed_federation, softmax_regression

from gcfed.methods.correction.feddc import FedDC
from gcfed.methods.correction.feddyn import FedDyn
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.subspace.ssf import SSF

DATA = skewed_federation()
DECAY = 0.7
SOLVER = partial(sgd, lr=0.2, weight_decay=DECAY, batch_size=9)


@pytest.fixture(scope="module")
def best():
    return optimum(softmax_regression(), DATA, DECAY)


def distance(best, rounds, *methods):
    """Three of four clients train in a round."""
    net = softmax_regression()
    solver = SOLVER(epochs=4)
    return (train_rounds(net, DATA, solver, rounds=rounds, methods=methods, k=3) - best).norm()


def test_fedavg_misses_the_optimum(best):
    assert distance(best, 8) > 0.1


@pytest.mark.parametrize("method", [Scaffold(), FedDyn(2.0), SSF(ratio=0.85), FedDC(2.0)])
def test_the_method_reaches_the_optimum(best, method):
    assert distance(best, 20, method) < 0.002
