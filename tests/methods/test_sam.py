"""FedSAM: equals its two-line rule; the weights come back bit for bit; ρ = 0 is FedAvg."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import CPU, make_download, make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, loss_at
from torch import nn
from torch.func import grad

from gcfed.federated.solver import local_objective
from gcfed.federated.stack import ClientStack, broadcast_state
from gcfed.methods.fedsol import FedSol
from gcfed.methods.proximal import Proximal
from gcfed.methods.sam import Sam


def by_hand(net, data, solver, rounds, rho, mu=0.0):
    """Local steps w ← w − η (∇F(w + ρ g/‖g‖) + μ (w − w₀)), g = ∇F(w), and plain means."""
    w0 = weights(net)
    for t in range(rounds):
        trained = []
        for client in cohort(data, t, 3):
            w = w0
            for x, y in batches(data, solver, client, t):
                gradient = grad(lambda v, x=x, y=y: loss_at(net, v, x, y))
                g = gradient(w)
                w = w - solver.lr(t) * (gradient(w + rho * g / g.norm()) + mu * (w - w0))
            trained.append(w)
        w0 = torch.stack(trained).mean(0)
    return w0


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_it_descends_by_the_gradient_at_the_worst_weights_nearby(federation, k, mu):
    """A proximal term, which another method adds to the gradient, is taken where the weights were."""
    net, methods = make_net(), [Proximal(mu), Sam(0.3)] if mu else [Sam(0.3)]
    expected = by_hand(net, federation, sgd(), 4, 0.3, mu)
    assert (expected - by_hand(net, federation, sgd(), 4, 0.0, mu)).norm() > 0.01
    trained = train_rounds(net, federation, sgd(), rounds=4, methods=methods, k=k)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", [Sam(0.0), FedSol(0.0)])
def test_rho_0_is_fedavg(federation, method):
    net = make_net()
    expected = train_rounds(copy.deepcopy(net), federation, sgd(), rounds=3, k=3)
    trained = train_rounds(net, federation, sgd(), rounds=3, k=3, methods=[method])
    assert torch.equal(trained, expected)


@pytest.mark.parametrize("method", [Sam(0.7), FedSol(0.7)])
def test_weights_and_running_statistics_come_back(federation, method):
    """What comes back are the weights before, and the statistics after, the first of both passes; frozen ones stay."""
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    net[2].bias.requires_grad_(False)
    start = broadcast_state(net)
    stack = ClientStack(net, start, np.arange(1), np.ones(1), np.ones(1))
    for leaf in stack.leaves.values():
        if leaf.requires_grad:
            leaf.data += 0.1 * torch.randn_like(leaf)
    plan = sgd().plan(federation, np.arange(1), make_download(start), CPU)
    batch = plan.batch(federation, 0, plan.kinds[0])
    before = {name: t.clone() for name, t in stack.full.items()}
    method.before_step(stack, batch, lambda: local_objective(stack, batch, [method])[1])
    moved = {name for name, leaf in stack.leaves.items() if not torch.equal(leaf, before[name])}
    assert {"0.weight", "2.weight"} <= moved
    assert "2.bias" not in moved
    once = stack.full["1.running_mean"].clone()
    assert not torch.equal(once, before["1.running_mean"])
    stack.backward(local_objective(stack, batch, [method])[1])
    assert not torch.equal(stack.full["1.running_mean"], once)
    method.on_after_backward(None, SimpleNamespace(clients=stack))
    assert torch.equal(stack.full["1.running_mean"], once)
    for name, leaf in stack.leaves.items():
        assert torch.equal(leaf, before[name])


def test_what_cannot_work_is_refused_by_name(federation):
    with pytest.raises(ValueError, match=r"methods: Sam and FedSol"):
        train_rounds(make_net(), federation, sgd(), rounds=1, methods=[Sam(), FedSol()])
