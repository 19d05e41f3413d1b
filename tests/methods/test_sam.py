"""FedSAM equals its two-line rule. FedSAM and FedSOL restore the weights bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import (
    CPU,
    make_download,
    make_net,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
    weights,
    with_batch_norm,
)  # fmt: skip
from plain_reference import batches, cohort, loss_at
from torch.func import grad

from gcfed.federated.refusals import validate_parts
from gcfed.federated.training.lent import broadcast_state
from gcfed.federated.training.solver import local_objective
from gcfed.federated.training.stack import ClientStack
from gcfed.methods.fedsol import FedSol
from gcfed.methods.proximal import Proximal
from gcfed.methods.sam import Sam


def by_hand(net, data, solver, rounds, rho, mu):
    """Local steps w ← w − η (∇F(w + ρ g/‖g‖) + μ (w − w₀)) with g = ∇F(w). Plain means."""
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


def test_steps_use_the_gradient_at_the_worst_weights_nearby(federation):
    """The proximal term of another method is computed at the weights before the move."""
    expected = by_hand(make_net(), federation, sgd(), 3, 0.3, 0.5)
    trained = train_rounds(make_net(), federation, sgd(), rounds=3, methods=[Proximal(0.5), Sam(0.3)], k=2)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", [Sam(0.7), FedSol(0.7)])
def test_weights_and_running_statistics_are_restored(federation, method):
    """The weights before the first pass and the statistics after it are restored. Frozen ones do not change."""
    net = with_batch_norm()
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


def test_two_methods_that_move_the_weights_are_refused_by_name():
    with pytest.raises(ValueError, match=r"methods: Sam and FedSol"):
        validate_parts(make_setup(make_net(), methods=[Sam(), FedSol()]))


class Counted(torch.nn.Module):
    """Counts training steps in a buffer that it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.steps = self.steps + 1
        return x


@pytest.mark.parametrize("k", [1, 3])
def test_running_statistics_come_from_the_first_pass(k):
    """With ρ = 0, weights and buffers equal FedAvg's, also counts and buffers that ``forward`` replaces."""
    found = []
    for methods in ([], [Sam(0.0)]):
        first, _, last = make_net()
        middle = [Counted()] if k > 1 else [Counted(), torch.nn.BatchNorm1d(5, momentum=None).double()]
        net = torch.nn.Sequential(first, *middle, last)
        train_rounds(net, random_federation(sizes=(10, 12, 8)), sgd(), rounds=2, methods=methods, k=k)
        found.append([t.double() for t in (*net.parameters(), *net.buffers())])
    assert all(map(torch.equal, *found))
