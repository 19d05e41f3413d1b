"""FedVARP against a plain loop, its table's mean, and the variance of partial participation that it removes."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, flat, local_sgd, optimum, skewed_federation, softmax_regression

from gcfed.federated.store import ClientStores
from gcfed.methods.fedvarp import FedVARP


def reference(net, data, solver, *, rounds, lr=0.1, momentum=0.0, server_lr=1.0):
    """The table in full, its mean taken anew in every round."""
    w, n = weights(net), len(data.clients)
    table = torch.zeros(n, len(w), dtype=w.dtype)
    for t in range(rounds):
        members = cohort(data, t, 3)
        deltas = [local_sgd(net, w, batches(data, solver, k, t), lr=lr, momentum=momentum)[0] - w for k in members]
        deltas = torch.stack(deltas)
        v = table.mean(0) + (deltas - table[members]).mean(0)
        table[members] = deltas
        w = w + server_lr * v
    return w, table


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_it_is_the_plain_loop(federation, k, server_lr):
    solver, method, stores = sgd(momentum=0.5), FedVARP(), ClientStores()
    server = partial(torch.optim.SGD, lr=server_lr)
    ours = train_rounds(
        make_net(), federation, solver, rounds=7, methods=[method], k=k, stores=stores, server=server
    )  # fmt: skip
    theirs, table = reference(make_net(), federation, solver, rounds=7, momentum=0.5, server_lr=server_lr)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    y = method.server_state("y", {})
    held = stores.open("fedvarp").read(np.arange(5), y)
    torch.testing.assert_close(torch.cat([v.flatten(1) for v in held.values()], 1), table, rtol=0, atol=1e-10)
    torch.testing.assert_close(flat(y), table.mean(0), rtol=0, atol=1e-10)


def test_with_all_clients_and_in_the_first_round_it_is_fedavg(federation):
    for rounds, cohort_of, atol in ((6, 5, 1e-12), (1, 3, 0)):
        run = partial(train_rounds, data=federation, solver=sgd(), rounds=rounds, cohort_of=cohort_of)
        fedavg = run(make_net())
        ours = run(make_net(), methods=[FedVARP()])
        torch.testing.assert_close(ours, fedavg, rtol=0, atol=atol)


def test_partial_participation_costs_no_accuracy():
    """With one local step two of four clients lead to the optimum of all; FedAvg keeps jumping around it."""
    data, solver = skewed_federation(), sgd(lr=0.2, weight_decay=0.5, epochs=1, batch_size=9)
    best = optimum(softmax_regression(), data, 0.5)
    run = partial(train_rounds, data=data, solver=solver, k=2, cohort_of=2)
    fedavg = run(softmax_regression(), rounds=30)
    ours = run(softmax_regression(), rounds=120, methods=[FedVARP()])
    assert (fedavg - best).norm() > 0.05
    assert (ours - best).norm() < 1e-3
