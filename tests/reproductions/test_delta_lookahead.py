"""GC-Fed's FedACG until August 2025 equals a plain loop, and refuses servers with another step."""

from functools import partial

import pytest
import torch
from harness import assert_near, join_run, make_net, make_setup, sgd, train_rounds, weights
from plain_reference import batches, cohort, local_sgd
from torch.optim import SGD

from reproductions.delta_lookahead import DeltaLookAhead


@pytest.mark.parametrize("k", [1, 2])
def test_it_equals_the_plain_loop(federation, k):
    """m is FedACG's, but the server adds Δ only."""
    net = make_net()
    lam = 0.85
    theta = weights(net)
    m = 0.0
    for t in range(4):
        ahead = theta + lam * m
        ends = []
        for client in cohort(federation, t, 3):
            end, _ = local_sgd(net, ahead, batches(federation, sgd(), client, t), lr=0.1)
            ends.append(end)
        delta = torch.stack(ends).mean(0) - ahead
        m = lam * m + delta
        theta = theta + delta
    found = train_rounds(rounds=4, methods=[DeltaLookAhead(lam)], k=k)
    assert_near(found, theta, 1e-10)


def test_a_server_with_momentum_is_refused():
    setup = make_setup(make_net(), server=partial(SGD, lr=1.0, momentum=0.85))
    with pytest.raises(ValueError, match=r"needs server\.momentum=0\.0, not 0\.85: .* θ ← θ \+ Δ"):
        join_run(DeltaLookAhead(), setup)
