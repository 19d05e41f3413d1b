import pytest
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, local_sgd

from gcfed.methods.server.fednova import FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_each_client_counts_as_one_average_step(federation, momentum):
    solver = sgd(momentum=momentum)
    w = weights(make_net())
    data = broken(federation, 3)
    for t in range(2):
        directions = []
        lengths = []
        for k in {*cohort(data, t, 3)} - {3}:  # client 3 has numbers that are not finite
            w_k, steps = local_sgd(
                make_net(), w, batches(data, solver, k, t), lr=0.1, momentum=momentum
            )
            velocity = length = 0.0
            for _ in range(steps):  # along a constant gradient of one
                velocity = momentum * velocity + 1
                length += velocity
            directions.append((w_k - w) / length)
            lengths.append(length)
        w = w + sum(lengths) / len(lengths) * sum(directions) / len(directions)
    found = train_rounds(make_net(), data, solver, rounds=2, methods=[FedNova()], k=2)
    assert_near(found, w, 1e-10)
