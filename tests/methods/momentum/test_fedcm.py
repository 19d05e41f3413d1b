"""FedCM equals a plain loop with autograd, and its α and Δ have the paper's meaning."""

import torch
from harness import assert_near, make_net, random_federation, server_of, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, flat, gradient

from gcfed.methods.momentum.fedcm import FedCM


def reference(net, data, solver, rounds, *, alpha, weight_decay):
    """FedCM as the paper writes it. Δ is the mean of all local steps of the round
    over all clients.
    """
    w, direction = weights(net), 0.0
    for t in range(rounds):
        ends, steps = [], []
        for k in cohort(data, t, 3):
            w_k = w
            for x, y in batches(data, solver, k, t):
                steps.append(
                    alpha * gradient(net, w_k, x, y) + (1 - alpha) * direction + weight_decay * w_k
                )
                w_k = w_k - solver.lr(t) * steps[-1]
            ends.append(w_k)
        w, direction = torch.stack(ends).mean(0), torch.stack(steps).mean(0)
    return w


def test_it_equals_a_plain_loop(federation):
    solver = sgd(0.3, weight_decay=0.01, lr_decay=0.8)
    expected = reference(make_net(), federation, solver, 3, alpha=0.25, weight_decay=0.01)
    found = train_rounds(make_net(), federation, solver, rounds=3, methods=[FedCM(0.25)], k=2)
    assert_near(found, expected, 1e-10)


def test_delta_is_the_mean_of_the_finite_clients_steps():
    """The large client is not finite. The other client makes one step, so Δ is its gradient."""
    data = broken(random_federation(sizes=(4, 40)), 1)
    method, net = FedCM(0.25), make_net()
    grad = gradient(make_net(), weights(net), data.x[:4], data.y[:4])
    train_rounds(net, data, sgd(epochs=1), rounds=1, cohort_of=2, methods=[method])
    assert_near(flat(server_of(method).server_state("delta", {})), 0.25 * grad, 1e-12)
