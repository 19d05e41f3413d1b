"""FedDyn equals a plain loop on the paper's objective."""

import pytest
import torch
from harness import assert_near, make_net, server_of, sgd, train_rounds, weights
from plain_reference import batches, cohort, flat, local_sgd

from gcfed.methods.correction.feddyn import FedDyn


def reference(net, data, solver, *, rounds, alpha, divide_by, lr=0.1, momentum, weight_decay):
    w = weights(net)
    n = len(data.clients)
    h = torch.zeros_like(w)
    grads = {k: torch.zeros_like(w) for k in range(n)}
    for t in range(rounds):
        models = []
        members = cohort(data, t, 3)
        for k in members:

            def term(v, grad=grads[k], start=w):
                return -grad @ v + alpha / 2 * (v - start).square().sum()

            steps = batches(data, solver, k, t)
            w_k, _ = local_sgd(
                net, w, steps, lr=lr, momentum=momentum, weight_decay=weight_decay, term=term
            )
            grads[k] = grads[k] - alpha * (w_k - w)
            models.append(w_k)
        h = (
            h
            - alpha
            * sum(m - w for m in models)
            / {"clients": n, "authors": len(members) ** 2}[divide_by]
        )
        w = sum(models) / len(models) - h / alpha
    return w, h


@pytest.mark.parametrize("divide_by", ["clients", "authors"])
def test_it_equals_the_plain_loop(federation, divide_by):
    setting = {"momentum": 0.5, "weight_decay": 0.01}
    method = FedDyn(0.3, divide_by=divide_by)
    solver = sgd(**setting)
    ours = train_rounds(make_net(), federation, solver, rounds=4, methods=[method], k=2)
    theirs, h = reference(
        make_net(), federation, solver, rounds=4, alpha=0.3, divide_by=divide_by, **setting
    )
    assert_near(ours, theirs, 1e-10)
    assert_near(-0.3 * flat(server_of(method).server_state("u", {})), h, 1e-10)
