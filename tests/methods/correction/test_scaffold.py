"""SCAFFOLD equals a plain loop, with and without momentum."""

from functools import partial

import pytest
import torch
from harness import assert_near, make_net, make_setup, server_of, train_rounds, weights
from plain_reference import batches, cohort, flat, local_sgd

from gcfed.federated.parts.refusals import validate_parts
from gcfed.federated.training.solver import LocalSolver
from gcfed.methods.correction.scaffold import Scaffold


def plain_steps(steps, momentum, **kwargs):
    """Counts plain steps by running torch's SGD with a constant gradient of one."""
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum, **kwargs)
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
    return -w.item()


def reference(
    net,
    data,
    solver,
    *,
    rounds,
    momentum=0.0,
    nesterov=False,
    corrected=True,
    lr=0.1,
    weight_decay=0.0,
):
    w = weights(net)
    n = len(data.clients)
    c = torch.zeros_like(w)
    own = {k: torch.zeros_like(w) for k in range(n)}
    for t in range(rounds):
        deltas = []
        changes = []
        for k in cohort(data, t, 3):
            w_k, steps = local_sgd(
                net,
                w,
                batches(data, solver, k, t),
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                term=lambda v, correction=c - own[k]: correction @ v,
            )
            if corrected:
                steps = plain_steps(steps, momentum, nesterov=nesterov)
            new = own[k] - c + (w - w_k) / (steps * lr)
            deltas.append(w_k - w)
            changes.append(new - own[k])
            own[k] = new
        w = w + sum(deltas) / len(deltas)
        c = c + sum(changes) / n
    return w, c


@pytest.mark.parametrize(
    ("momentum", "nesterov", "corrected"),
    [
        (0.0, False, True),
        (0.9, False, True),
        (0.9, False, False),
        (0.6, True, True),
    ],
)
def test_it_equals_the_plain_loop(federation, momentum, nesterov, corrected):
    settings = {"momentum": momentum, "nesterov": nesterov, "weight_decay": 0.01}
    optimizer = partial(torch.optim.SGD, lr=0.1, **settings)
    method = Scaffold(momentum_correction=corrected)
    solver = LocalSolver(optimizer, epochs=2, batch_size=4)
    ours = train_rounds(make_net(), federation, solver, rounds=4, methods=[method], k=2)
    theirs, c = reference(make_net(), federation, solver, rounds=4, corrected=corrected, **settings)
    assert_near(ours, theirs, 1e-10)
    assert_near(flat(server_of(method).shared), c, 1e-10)


def test_clients_that_ascend_are_refused():
    """The mean gradient would have the wrong sign: it comes from the way that a client went."""
    solver = LocalSolver(partial(torch.optim.SGD, lr=0.1, maximize=True))
    with pytest.raises(ValueError, match=r"Scaffold .* client\.optimizer\.maximize=false"):
        validate_parts(make_setup(make_net(), solver=solver, methods=[Scaffold()]))


def test_momentum_with_dampening_is_refused():
    solver = LocalSolver(partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5))
    with pytest.raises(ValueError, match=r"Scaffold .* client\.optimizer\.dampening=0"):
        validate_parts(make_setup(make_net(), solver=solver, methods=[Scaffold()]))
