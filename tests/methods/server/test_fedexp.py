"""FedExP equals a plain loop. Its model is the average of the last two iterates."""

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, centred, cohort, local_sgd

from gcfed.methods.centralization import GlobalGC
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.personal.tensors import Personal
from gcfed.methods.server.fedexp import FedExP


def by_hand(data, lr, rounds, epsilon, absent=(), project=lambda step: step):
    """Returns the average of the last two iterates, and whether any step was lengthened."""
    net = make_net()
    before = w = weights(net)
    longer = False
    for t in range(rounds):
        ends = [
            local_sgd(net, w, batches(data, sgd(lr), k, t), lr=lr)[0]
            for k in cohort(data, t, 3)
            if k not in absent
        ]
        updates = torch.stack(ends) - w
        mean = updates.mean(0)
        eta = max(
            1.0,
            float(updates.square().sum() / (2 * len(updates) * (mean.square().sum() + epsilon))),
        )
        before = w
        w = w + project(eta * mean)
        longer = longer or eta > 1
    return (before + w) / 2, longer


@pytest.mark.parametrize(("lr", "longer"), [(0.001, False), (0.5, True)])
def test_it_equals_the_plain_loop(federation, lr, longer):
    expected, found = by_hand(federation, lr, 3, 1e-3)
    assert found is longer
    trained = train_rounds(make_net(), federation, sgd(lr), rounds=3, methods=[FedExP(1e-3)], k=2)
    assert_near(trained, expected, 1e-10)


def test_a_broken_client_does_not_count_and_global_gc_projects_the_step(federation):
    data = broken(federation, 3)
    expected, longer = by_hand(data, 0.5, 3, 1e-3, absent=[3], project=centred)
    assert longer
    methods = [FedExP(1e-3), GlobalGC()]
    trained = train_rounds(make_net(), data, sgd(0.5), rounds=3, methods=methods, k=2)
    assert_near(trained, expected, 1e-10)


@pytest.mark.parametrize("other", [Personal, Scaffold])
def test_without_longer_steps_the_clients_train_as_without_fedexp(other):
    before, last = (train_rounds(rounds=t, methods=[other()]) for t in (1, 2))
    found = train_rounds(rounds=2, methods=[other(), FedExP(1e9)])
    assert_near(found, (before + last) / 2, 1e-10)
