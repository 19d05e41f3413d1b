"""The proximal term: its gradient is that of μ/2 ‖w − w₀‖², and μ = 0 is FedAvg bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gcfed.federated.stack import ClientStack, broadcast_state
from gcfed.methods.proximal import Proximal


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_gradient_of_the_proximal_term(k, mu):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    start = broadcast_state(net)
    stack = ClientStack(net, start, np.arange(k), np.ones(k), np.ones(k))
    for leaf in stack.leaves.values():
        leaf.data.add_(torch.randn_like(leaf))
    x = torch.randn(k, 5, 4, dtype=torch.float64)

    leaves = list(stack.leaves.values())
    plain = list(stack.gradients(stack(x).logits_KBC.square().mean((1, 2))).values())
    term = sum(0.5 * mu * (leaf - start[n]).square().sum() for n, leaf in stack.leaves.items())
    expected = [g + pull for g, pull in zip(plain, torch.autograd.grad(term, leaves), strict=True)]

    stack.backward(stack(x).logits_KBC.square().mean((1, 2)))
    part = Proximal(mu)
    stack.prepared[part] = part.prepare(stack, {}, None)
    part.on_after_backward(None, SimpleNamespace(clients=stack))
    for grad, exp, bare in zip(stack.grads(), expected, plain, strict=True):
        torch.testing.assert_close(grad, exp)
        if mu == 0:
            assert torch.equal(grad, bare)
