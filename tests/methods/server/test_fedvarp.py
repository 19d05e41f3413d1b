"""FedVARP equals a plain loop with a full table."""

from functools import partial

import numpy as np
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, flat, local_sgd

from gcfed.federated.state.store import ClientStores
from gcfed.methods.server.fedvarp import FedVARP


def reference(net, data, solver, *, rounds, lr=0.1, momentum=0.0, server_lr=1.0):
    """Computes the mean of the table again in every round."""
    w = weights(net)
    n = len(data.clients)
    table = torch.zeros(n, len(w), dtype=w.dtype)
    for t in range(rounds):
        members = cohort(data, t, 3)
        deltas = [
            local_sgd(net, w, batches(data, solver, k, t), lr=lr, momentum=momentum)[0] - w
            for k in members
        ]
        deltas = torch.stack(deltas)
        v = table.mean(0) + (deltas - table[members]).mean(0)
        table[members] = deltas
        w = w + server_lr * v
    return w, table


def test_it_equals_the_plain_loop(federation):
    solver = sgd(momentum=0.5)
    method = FedVARP()
    stores = ClientStores()
    server = partial(torch.optim.SGD, lr=0.7)
    ours = train_rounds(
        make_net(),
        federation,
        solver,
        rounds=4,
        methods=[method],
        k=2,
        stores=stores,
        server=server,
    )
    theirs, table = reference(make_net(), federation, solver, rounds=4, momentum=0.5, server_lr=0.7)
    assert_near(ours, theirs, 1e-10)
    held = stores.read("fedvarp", np.arange(5), method.server_state("y", {}))
    assert_near(torch.cat([v.flatten(1) for v in held.values()], 1), table, 1e-10)
    assert_near(flat(method.server_state("y", {})), table.mean(0), 1e-10)
