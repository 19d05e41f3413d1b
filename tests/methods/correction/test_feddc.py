"""FedDC equals a plain loop with autograd of its objective."""

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, local_sgd

from gcfed.methods.correction.feddc import FedDC


def reference(net, data, solver, rounds, *, alpha, correction):
    """FedDC as the paper writes it.

    The gradient c_k is −g_k/(ηK), and all means are over all clients.
    """
    w = weights(net)
    n = len(data.clients)
    h, c = torch.zeros(2, n, len(w), dtype=w.dtype)
    for t in range(rounds):
        mean_c = c.mean(0)
        ends = []
        for k in cohort(data, t, 3):

            def term(v, k=k, start=w, pull=mean_c - c[k]):
                return alpha / 2 * (h[k] + v - start).square().sum() + v @ pull

            theta, tau = local_sgd(net, w, batches(data, solver, k, t), lr=solver.lr(t), term=term)
            h[k] += theta - w
            kept = c[k] - mean_c if correction == "control" else 0.0
            c[k] = kept - (theta - w) / (solver.lr(t) * tau)
            ends.append(theta)
        w = torch.stack(ends).mean(0) + h.mean(0)
    return w


@pytest.mark.parametrize("correction", ["update", "control"])
def test_it_equals_a_plain_loop(federation, correction):
    solver = sgd(0.2, lr_decay=0.8)
    expected = reference(make_net(), federation, solver, 4, alpha=0.3, correction=correction)
    method = FedDC(0.3, correction=correction)
    found = train_rounds(make_net(), federation, solver, rounds=4, methods=[method], k=2)
    assert_near(found, expected, 1e-10)
