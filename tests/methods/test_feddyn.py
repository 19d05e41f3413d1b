"""FedDyn against a plain loop on the paper's own objective, its states' mean, and the optimum that FedAvg misses."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import make_net, server_of, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, flat, local_sgd, optimum, skewed_federation, softmax_regression

from gcfed.federated.store import ClientStores
from gcfed.methods.feddyn import FedDyn


def reference(net, data, solver, *, rounds, alpha, divide_by="clients", lr=0.1, momentum=0.0, weight_decay=0.0):
    w, n = weights(net), len(data.clients)
    h, grads = torch.zeros_like(w), {k: torch.zeros_like(w) for k in range(n)}
    for t in range(rounds):
        models, members = [], cohort(data, t, 3)
        for k in members:

            def term(v, grad=grads[k], start=w):
                return -grad @ v + alpha / 2 * (v - start).square().sum()

            steps = batches(data, solver, k, t)
            w_k, _ = local_sgd(net, w, steps, lr=lr, momentum=momentum, weight_decay=weight_decay, term=term)
            grads[k] = grads[k] - alpha * (w_k - w)
            models.append(w_k)
        divisor = {"clients": n, "authors": len(members) ** 2}[divide_by]
        h = h - alpha * sum(m - w for m in models) / divisor
        w = sum(models) / len(models) - h / alpha
    return w, h


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("divide_by", ["clients", "authors"])
def test_it_is_the_plain_loop(federation, k, divide_by):
    solver, method = sgd(momentum=0.5, weight_decay=0.01), FedDyn(0.3, divide_by=divide_by)
    ours = train_rounds(make_net(), federation, solver, rounds=6, methods=[method], k=k)
    theirs, h = reference(
        make_net(), federation, solver, rounds=6, alpha=0.3, divide_by=divide_by, momentum=0.5, weight_decay=0.01
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    torch.testing.assert_close(-0.3 * flat(server_of(method).server_state("u", {})), h, rtol=0, atol=1e-10)


def test_the_servers_state_is_the_mean_of_the_clients(federation):
    """Also where a client's numbers are not finite: it keeps its state."""
    net, method, stores = make_net(), FedDyn(), ClientStores()
    train_rounds(net, broken(federation, 1), sgd(), rounds=5, methods=[method], stores=stores, k=2, cohort_of=4)
    u = server_of(method).server_state("u", {})
    own = stores.open("feddyn").read(np.arange(5), u)
    for name, mean in u.items():
        assert own[name][1].abs().sum() == 0
        assert mean.abs().sum() > 0
        torch.testing.assert_close(own[name].mean(0), mean, rtol=0, atol=1e-12)


def test_it_reaches_the_optimum_that_fedavg_misses():
    data, solver = skewed_federation(), sgd(lr=0.2, weight_decay=0.5, epochs=4, batch_size=9)
    best = optimum(softmax_regression(), data, 0.5)
    run = partial(train_rounds, data=data, solver=solver, k=2, cohort_of=2)
    fedavg = run(softmax_regression(), rounds=30)
    ours = run(softmax_regression(), rounds=50, methods=[FedDyn(2.0)])
    assert (fedavg - best).norm() > 0.05
    assert (ours - best).norm() < 1e-5


def test_in_the_first_step_a_client_takes_a_plain_one(federation):
    """After it w₀ + (1 + |S|/N) · mean Δ, since h is no longer 0."""
    solver, start = sgd(steps=1), weights(make_net())
    fedavg = train_rounds(make_net(), federation, solver, rounds=1)
    ours = train_rounds(make_net(), federation, solver, rounds=1, methods=[FedDyn()])
    torch.testing.assert_close(ours - start, (fedavg - start) * (1 + 3 / 5), rtol=0, atol=1e-14)
