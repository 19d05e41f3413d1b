"""FedCM equals a plain loop with autograd, and its α and Δ have the paper's meaning."""

import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, gradient

from gcfed.methods.momentum.fedcm import FedCM


def reference(net, data, solver, rounds, *, alpha, weight_decay):
    """FedCM as the paper writes it. Δ is the mean of all local steps of the round
    over all clients.
    """
    w = weights(net)
    direction = 0.0
    for t in range(rounds):
        ends = []
        steps = []
        for k in cohort(data, t, 3):
            w_k = w
            for x, y in batches(data, solver, k, t):
                steps.append(
                    alpha * gradient(net, w_k, x, y) + (1 - alpha) * direction + weight_decay * w_k
                )
                w_k = w_k - solver.lr(t) * steps[-1]
            ends.append(w_k)
        w = torch.stack(ends).mean(0)
        direction = torch.stack(steps).mean(0)
    return w


def test_it_equals_a_plain_loop(federation):
    solver = sgd(0.3, weight_decay=0.01, lr_decay=0.8)
    expected = reference(make_net(), federation, solver, 3, alpha=0.25, weight_decay=0.01)
    found = train_rounds(make_net(), federation, solver, rounds=3, methods=[FedCM(0.25)], k=2)
    assert_near(found, expected, 1e-10)
