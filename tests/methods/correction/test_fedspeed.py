"""FedSpeed equals a plain loop over its Algorithm 1, and over its authors' server."""

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, gradient

from gcfed.methods.correction.feddyn import FedDyn
from gcfed.methods.correction.fedspeed import FedSpeed
from gcfed.methods.sharpness.sam import Sam

ALPHA = 0.5
RHO = 0.3
MIX = 0.3
LR = 0.1
ROUNDS = 5


def by_hand(net, data, duals, absent=None):
    """Three of five clients train in a round. ``absent`` is never finite and does not count."""
    x = weights(net)
    n = len(data.clients)
    g_hat = [torch.zeros_like(x) for _ in range(n)]
    for t in range(ROUNDS):
        ends = []
        corrected = []
        for i in (k for k in cohort(data, t, 3) if k != absent):
            w = x
            for inputs, labels in batches(data, sgd(), i, t):
                g1 = gradient(net, w, inputs, labels)
                g2 = gradient(net, w + RHO * g1 / g1.norm(), inputs, labels)
                quasi = (1 - MIX) * g1 + MIX * g2
                w = w - LR * (quasi - g_hat[i] + ALPHA * (w - x))
            g_hat[i] = g_hat[i] - ALPHA * (w - x)
            ends.append(w)
            corrected.append(w - g_hat[i] / ALPHA)
        if duals == "cohort":
            x = torch.stack(corrected).mean(0)
        else:
            x = torch.stack(ends).mean(0) - torch.stack(g_hat).mean(0) / ALPHA
    return x


def ours(data, duals, k=2):
    methods = [Sam(RHO, alpha=MIX), FedSpeed(ALPHA, duals=duals)]
    return train_rounds(make_net(), data, sgd(lr=LR), rounds=ROUNDS, methods=methods, k=k)


@pytest.mark.parametrize("duals", ["cohort", "clients"])
@pytest.mark.parametrize("absent", [None, 3])
def test_it_equals_the_plain_loop(federation, duals, absent):
    data = federation if absent is None else broken(federation, absent)
    expected = by_hand(make_net(), data, duals, absent)
    assert_near(ours(data, duals), expected, 1e-10)


def test_the_duals_of_all_clients_are_feddyn(federation):
    methods = [Sam(RHO, alpha=MIX), FedDyn(ALPHA)]
    feddyn = train_rounds(make_net(), federation, sgd(lr=LR), rounds=ROUNDS, methods=methods, k=2)
    assert torch.equal(ours(federation, "clients"), feddyn)
