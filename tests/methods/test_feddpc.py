"""FedDPC equals a plain loop that takes the residual of each client's update to the server's last step."""

from functools import partial

import pytest
import torch
from harness import make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, loss_at

from gcfed.federated.aggregate import MeanAggregator
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.feddpc import FedDPC
from gcfed.methods.lookahead import LookAhead

LR = 0.3


def centred(w, layers):
    """Subtracts the mean over the inputs of each output, in some layers of the flat gradient or update."""
    first, bias, second, rest = w.split([30, 5, 20, 4])
    first, second = (
        m - m.mean(1, keepdim=True) * (i in layers) for i, m in enumerate((first.view(5, 6), second.view(4, 5)))
    )
    return torch.cat([first.flatten(), bias, second.flatten(), rest])


def by_hand(data, *, gc=False, lr=1.0, momentum=0.0, ahead=False, cohort_of=3, absent=(), by_samples=False, rounds=4):
    """Returns the model, and by how much the clients' updates lie along the last step: the largest cosine."""
    theta, velocity, last, cosine = weights(make_net()), 0.0, None, 0.0
    for t in range(rounds):
        start = theta + momentum * velocity * ahead
        total = count = 0.0
        for k in {*cohort(data, t, cohort_of)} - {*absent}:
            w = start.clone()
            for x, y in batches(data, sgd(LR), k, t):
                w.requires_grad_()
                (grad,) = torch.autograd.grad(loss_at(make_net(), w, x, y), w)
                w = w.detach() - LR * (centred(grad, {0}) if gc else grad)
            update, weight = w - start, len(data.clients[k]) if by_samples else 1
            if last is not None and last.any():
                cosine = max(cosine, abs(float(torch.cosine_similarity(update, last, dim=0))))
                update = update - (update @ last) / (last @ last) * last
            total, count = total + weight * update, count + weight
        before = theta
        if count:
            mean = centred(total / count, {0, 1}) if gc else total / count
            velocity = momentum * velocity + mean
            theta = theta + lr * velocity
        last = theta - before
    return theta, cosine


@pytest.mark.parametrize("gc", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_it_equals_the_residuals_of_each_client(federation, gc, k):
    expected, cosine = by_hand(federation, gc=gc)
    assert cosine > 0.2  # else there is nothing to remove
    methods = [FedDPC(), *[GradientCentralization(boundary="2")] * gc]
    found = train_rounds(make_net(), federation, sgd(LR), rounds=4, methods=methods, k=k)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_last_step_is_that_of_the_servers_optimizer(federation):
    expected, _ = by_hand(federation, lr=0.7, momentum=0.5)
    server = partial(torch.optim.SGD, lr=0.7, momentum=0.5)
    found = train_rounds(make_net(), federation, sgd(LR), rounds=4, methods=[FedDPC()], server=server)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_last_step_is_the_models_where_clients_start_ahead_of_it(federation):
    expected, _ = by_hand(federation, momentum=0.5, ahead=True)
    server = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
    found = train_rounds(make_net(), federation, sgd(LR), rounds=4, methods=[FedDPC(), LookAhead(0.5)], server=server)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_weights_of_clients_and_broken_clients(federation):
    data = broken(federation, 3)
    expected, _ = by_hand(data, absent=[3], by_samples=True)
    aggregator = MeanAggregator(weighting="samples")
    found = train_rounds(make_net(), data, sgd(LR), rounds=4, methods=[FedDPC()], aggregator=aggregator)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_after_a_round_without_a_step_nothing_is_removed(federation):
    (lost,) = cohort(federation, 1, 1)
    data = broken(federation, lost)
    expected, cosine = by_hand(data, cohort_of=1, absent=[lost])
    assert cosine > 0.2
    found = train_rounds(make_net(), data, sgd(LR), rounds=4, methods=[FedDPC()], cohort_of=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
