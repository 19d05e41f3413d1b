"""SCAFFOLD against a plain loop, its variates' mean, and the optimum that FedAvg misses."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import Sizes, make_net, make_setup, server_of, sgd, train_rounds, weights
from plain_reference import batches, cohort, flat, local_sgd, optimum, skewed_federation, softmax_regression

from gcfed.federated.messages import nbytes
from gcfed.federated.refusals import validate_parts
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stack import broadcast_state
from gcfed.federated.store import ClientStores
from gcfed.methods.scaffold import Scaffold, effective_steps


def plain_steps(steps, momentum, **kwargs):
    """Counts by running torch's SGD along a constant gradient of one."""
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum, **kwargs)
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
    return -w.item()


def reference(net, data, solver, *, rounds, momentum=0.0, corrected=True, lr=0.1, weight_decay=0.0):
    w, n = weights(net), len(data.clients)
    c, own = torch.zeros_like(w), {k: torch.zeros_like(w) for k in range(n)}
    for t in range(rounds):
        deltas, changes = [], []
        for k in cohort(data, t, 3):
            correction = c - own[k]
            w_k, steps = local_sgd(
                net, w, batches(data, solver, k, t), lr=lr, momentum=momentum, weight_decay=weight_decay,
                term=lambda v, correction=correction: correction @ v,
            )  # fmt: skip
            if corrected:
                steps = plain_steps(steps, momentum)
            new = own[k] - c + (w - w_k) / (steps * lr)
            deltas.append(w_k - w)
            changes.append(new - own[k])
            own[k] = new
        w = w + sum(deltas) / len(deltas)
        c = c + sum(changes) / n
    return w, c


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("momentum", "corrected"), [(0.0, True), (0.9, True), (0.9, False)])
def test_it_is_the_plain_loop(federation, k, momentum, corrected):
    solver, method = sgd(momentum=momentum, weight_decay=0.01), Scaffold(momentum_correction=corrected)
    ours = train_rounds(make_net(), federation, solver, rounds=6, methods=[method], k=k)
    theirs, c = reference(
        make_net(), federation, solver, rounds=6, momentum=momentum, corrected=corrected, weight_decay=0.01
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    torch.testing.assert_close(flat(server_of(method).control), c, rtol=0, atol=1e-10)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps(momentum, nesterov):
    nesterov = nesterov and momentum > 0
    expected = [plain_steps(t, momentum, nesterov=nesterov) for t in (1, 2, 7)]
    assert effective_steps(np.array([1, 2, 7]), momentum, nesterov=nesterov) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("cohort_of", [2, 5])
def test_the_servers_variate_is_the_mean_of_the_clients(federation, cohort_of):
    net, method, stores = make_net(), Scaffold(), ClientStores()
    train_rounds(
        net, federation, sgd(momentum=0.5), rounds=5, methods=[method], stores=stores, k=2, cohort_of=cohort_of
    )
    own = stores.open("scaffold").read(np.arange(5), server_of(method).control)
    for name, c in server_of(method).control.items():
        torch.testing.assert_close(own[name].mean(0), c, rtol=0, atol=1e-12)
        assert c.abs().sum() > 0


def test_it_reaches_the_optimum_that_fedavg_misses():
    data, solver = skewed_federation(), sgd(lr=0.2, weight_decay=0.5, epochs=4, batch_size=9)
    best = optimum(softmax_regression(), data, 0.5)
    run = partial(train_rounds, data=data, solver=solver, k=2, cohort_of=2)
    fedavg = run(softmax_regression(), rounds=30)
    ours = run(softmax_regression(), rounds=40, methods=[Scaffold()])
    assert (fedavg - best).norm() > 0.05
    assert (ours - best).norm() < 1e-5


def test_the_first_round_is_fedavg_bit_for_bit(federation):
    fedavg = train_rounds(make_net(), federation, sgd(), rounds=1)
    ours = train_rounds(make_net(), federation, sgd(), rounds=1, methods=[Scaffold()])
    assert torch.equal(ours, fedavg)


def test_it_sends_twice_the_bytes(federation):
    net, sizes = make_net(), Sizes()
    train_rounds(net, federation, sgd(), rounds=1, methods=[Scaffold(), sizes], k=2)
    size = nbytes(broadcast_state(net))
    assert sizes.up == [2 * size] * 2
    assert sizes.down == [2 * size]


def test_momentum_with_dampening_is_refused():
    solver = LocalSolver(partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5))
    with pytest.raises(ValueError, match=r"client\.optimizer\.dampening=0\.5"):
        validate_parts(make_setup(make_net(), solver=solver, methods=[Scaffold()]))
