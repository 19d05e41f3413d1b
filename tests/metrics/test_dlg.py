"""The attack against what it is to find: a sample whose gradient it is given."""

from functools import partial

import pytest
import torch
from torch import nn

from gcfed.metrics.leakage import OPTIMIZERS, invert_gradient


def smooth_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(4 * 9, 12), nn.Tanh(),
        nn.Linear(12, 5),
    ).double()  # fmt: skip


def gradient_of(net, x, y):
    """Autograd's, of the mean cross-entropy, by name."""
    names, params = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), params)
    return dict(zip(names, grads, strict=True))


def start(seed=0):
    return torch.Generator().manual_seed(seed)


def weights_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def sample(batch=1):
    x = torch.randn(batch, 1, 6, 6, generator=start(3), dtype=torch.float64)
    return x, torch.arange(batch) + 2


@pytest.mark.parametrize("settings", [{"iterations": 30}, {"optimizer": "adam", "iterations": 200}])
def test_it_recovers_the_sample_and_its_label(settings):
    """At the weights that it is given; it touches neither the network nor the global generator."""
    net, (x, y) = smooth_net(), sample()
    given, target = weights_of(net), gradient_of(net, x, y)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    moved, before = weights_of(net), torch.get_rng_state()
    found = invert_gradient(net, given, target, x.shape, 5, random=start(), **settings)
    assert found.mismatch < 1e-3
    assert (found.x - x).square().mean() < 0.05  # at random it is 2
    assert found.labels.argmax(-1).tolist() == y.tolist()
    torch.testing.assert_close(found.labels.sum(-1), torch.ones(1, dtype=torch.float64))
    assert all(torch.equal(p, moved[n]) and p.grad is None for n, p in net.named_parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_the_mismatch_is_that_of_what_it_returns():
    """Computed here from the recovered inputs and soft labels alone, through ``cross_entropy``."""
    net, (x, y) = smooth_net(), sample(2)
    target = gradient_of(net, x, y)
    found = invert_gradient(net, weights_of(net), target, x.shape, 5, random=start(), iterations=3)
    own = gradient_of(net, found.x, found.labels)
    apart = sum((own[n] - target[n]).square().sum() for n in target)
    assert found.mismatch == pytest.approx(float(apart / sum(t.square().sum() for t in target.values())), rel=1e-9)


def test_a_search_that_diverges_returns_the_best_that_it_met(monkeypatch):
    """With an infinite step the second point is no number: the first is left."""
    monkeypatch.setitem(OPTIMIZERS, "adam", partial(torch.optim.Adam, lr=float("inf")))
    net, (x, y) = smooth_net(), sample()
    arguments = (net, weights_of(net), gradient_of(net, x, y), x.shape, 5)
    found = invert_gradient(*arguments, random=start(), iterations=9, optimizer="adam")
    assert 0 < found.mismatch < float("inf")
    torch.testing.assert_close(found.x, torch.randn(1, 1, 6, 6, generator=start()).double())
