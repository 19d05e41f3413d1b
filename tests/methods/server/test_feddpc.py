"""FedDPC equals a plain loop that takes the residual of each client's update to the server's last
step.
"""

from functools import partial

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, centred, cohort, gradient

from gcfed.aggregators.mean import MeanAggregator
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.momentum.lookahead import LookAhead
from gcfed.methods.server.feddpc import FedDPC


def by_hand(
    data, *, gc=False, lr=1.0, momentum=0.0, ahead=False, cohort_of=3, absent=None, samples=False
):
    """Returns the model after four rounds, and the largest cosine of an update and
    the last step.
    """
    net = make_net()
    theta = weights(net)
    velocity = torch.zeros(59)
    last = torch.zeros(59)
    cosine = 0.0
    for t in range(4):
        start = theta + momentum * velocity * ahead
        total = 0.0
        count = 0.0
        for k in {*cohort(data, t, cohort_of)} - {absent}:
            w = start.clone()
            for x, y in batches(data, sgd(), k, t):
                grad = gradient(net, w, x, y)
                w = w - 0.3 * (centred(grad, {0}) if gc else grad)
            update = w - start
            weight = len(data.clients[k]) if samples else 1
            if last.any():
                cosine = max(cosine, abs(float(torch.cosine_similarity(update, last, dim=0))))
                update = update - (update @ last) / (last @ last) * last
            total = total + weight * update
            count = count + weight
        before = theta
        if count:
            velocity = momentum * velocity + centred(total / count, {0, 1} if gc else {})
            theta = theta + lr * velocity
        last = theta - before
    return theta, cosine


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ({}, {"k": 1}),
        ({"gc": True}, {"k": 2, "methods": [FedDPC(), GradientCentralization(boundary="2")]}),
        # s is not Δ
        ({"lr": 0.7, "momentum": 0.5}, {"server": partial(torch.optim.SGD, lr=0.7, momentum=0.5)}),
        (
            {"momentum": 0.5, "ahead": True},
            {  # s is the model's step, not that of the clients' start
                "methods": [FedDPC(), LookAhead(0.5)],
                "server": partial(torch.optim.SGD, lr=1.0, momentum=0.5),
            },
        ),
        ({"absent": 3, "samples": True}, {"aggregator": MeanAggregator("samples")}),
        # after a round without a step, nothing is removed
        ({"cohort_of": 1, "absent": 2}, {"cohort_of": 1}),
    ],
)
def test_it_equals_the_residuals_of_each_client(federation, case, options):
    if lost := case.get("absent"):
        federation = broken(federation, lost)
    expected, cosine = by_hand(federation, **case)
    assert cosine > 0.2  # else there is nothing to remove
    found = train_rounds(
        make_net(), federation, sgd(0.3), rounds=4, **{"methods": [FedDPC()]} | options
    )
    assert_near(found, expected, 1e-10)
