"""FedSOL equals its rule with autograd of the divergence, also with scalar
parameters and padding.
"""

import numpy as np
import pytest
import torch
from harness import ArrayData, assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, gradient, tensors
from torch import nn
from torch.func import functional_call

from gcfed.methods.sharpness.fedsol import FedSol


def divergence(net, w, w0, x, temperature):
    """The proximal loss KL(w₀ ‖ w) of softened outputs, computed from probabilities."""
    p, q = (
        (functional_call(net, tensors(net, v), (x,)) / temperature).softmax(-1) for v in (w0, w)
    )
    return (p * (p / q).log()).sum(-1).mean()


def drift_scale(net, w, w0):
    """|w − w₀|, where each column of each tensor is divided by its norm."""
    scales = []
    for tensor in tensors(net, (w - w0).abs()).values():
        scale = torch.zeros_like(tensor)
        for column in np.ndindex(*tensor.shape[1:]):
            v = tensor[(slice(None), *column)]
            if v.any():
                scale[(slice(None), *column)] = v / v.square().sum().sqrt()
        scales.append(scale.flatten())
    return torch.cat(scales)


def by_hand(net, data, solver, rounds, rho, temperature, adaptive):
    """Local steps w ← w − η ∇F(w + ρ Λ g/‖g‖) with g = ∇ KL(w₀ ‖ w), and plain SGD if w = w₀.

    Plain means.
    """
    w0 = weights(net)
    for t in range(rounds):
        trained = []
        for client in cohort(data, t, 3):
            w = w0
            for x, y in batches(data, solver, client, t):
                at = w
                if not torch.equal(w, w0):
                    (g,) = torch.autograd.grad(
                        divergence(net, w.requires_grad_(), w0, x, temperature), w
                    )
                    w = w.detach()
                    at = w + rho * (drift_scale(net, w, w0) if adaptive else 1.0) * g / g.norm()
                w = w - solver.lr(t) * gradient(net, at, x, y)
            trained.append(w)
        w0 = torch.stack(trained).mean(0)
    return w0


@pytest.mark.parametrize("adaptive", [True, False])
def test_steps_use_the_gradient_at_proximally_perturbed_weights(federation, adaptive):
    expected = by_hand(make_net(), federation, sgd(), 2, 0.8, 2.0, adaptive)
    assert (expected - by_hand(make_net(), federation, sgd(), 2, 0.0, 2.0, adaptive)).norm() > 1e-3
    method = FedSol(0.8, temperature=2.0, adaptive=adaptive)
    trained = train_rounds(rounds=2, methods=[method], k=2)
    assert_near(trained, expected, 1e-10)


class Scaled(nn.Module):
    """A network for sequences with a scalar parameter and one label per position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 4)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.out(self.embed(x).tanh() * self.gain)


@pytest.mark.parametrize("adaptive", [True, False])
def test_padding_does_not_count(adaptive):
    """Clients of unequal sizes with padded sequences train one by one and in a stack."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(5, (13, 6), generator=g)
    y = torch.randint(4, (13, 6), generator=g)
    y[::3, 4:] = -100
    data = ArrayData(x, y, np.split(np.arange(13), [5, 6]))

    def run(k):
        torch.manual_seed(0)
        net = Scaled().double()
        before = weights(net)
        trained = train_rounds(net, data, sgd(), rounds=1, methods=[FedSol(adaptive=adaptive)], k=k)
        assert (trained - before).norm() > 0.01
        return trained

    alone = run(1)
    together = run(3)
    assert_near(together, alone, 1e-10)
    x[::3, 4:] = 0  # changes only padded positions
    assert_near(run(1), alone, 1e-12)
