"""Stages compose to the network, and a teacher is the plain network: its parameters fixed, its input not."""

import copy

import numpy as np
import pytest
import torch
from test_models import SHAPE, build, narrow_vgg

from gcfed.federated.forward import Tap
from gcfed.federated.stack import ClientStack, broadcast_state

NAMES = list(SHAPE)
SMALL = {"resnet18_gn": (3, 8, 8), "vgg11": (3, 32, 32)}


def network(name, seed=0):
    return (narrow_vgg(seed) if name == "vgg11" else build(name, seed)).double()


def images(name, *batch):
    shape, g = SMALL.get(name, SHAPE[name]), torch.Generator().manual_seed(1)
    return torch.randn(*batch, *shape, generator=g, dtype=torch.float64)


def compose(net, h, first=0):
    outputs = []
    for stage in list(net.stages().values())[first:]:
        outputs.append(h := stage(h))
    return outputs


@pytest.mark.parametrize("name", NAMES)
def test_the_stages_one_after_the_other_are_forward(name):
    net, x = network(name).eval(), images(name, 2)
    outputs = compose(net, x)
    assert len(outputs) >= 3
    assert torch.equal(outputs[-1], net(x))
    names = [n for n, _ in net.named_parameters()]
    used = torch.autograd.grad(outputs[-1].square().sum(), list(net.parameters()), allow_unused=True)
    assert not [n for n, g in zip(names, used, strict=True) if g is None]  # no parameter lies between two stages


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_is_the_plain_network(name, k, shared):
    """From the first stage (with its features), the second and the last; only the stack trains with dropout."""
    net = network(name).train()
    others = [net] * k if shared else [network(name, seed) for seed in range(1, 1 + k)]
    stack = ClientStack(net, broadcast_state(net), np.arange(k), np.ones(k), np.ones(k))
    with torch.no_grad():
        for leaf in stack.leaves.values():  # the clients' own weights must not matter
            leaf.add_(1.0)
    params = None
    if not shared:
        params = {n: torch.stack([dict(o.named_parameters())[n].detach() for o in others]) for n in stack.leaves}
    teachers = [copy.deepcopy(o).eval() for o in others]
    x = images(name, k, 1)
    inner = [compose(t, x[i]) for i, t in enumerate(teachers)]
    for first in (0, 1, len(inner[0]) - 1):
        h = x if first == 0 else torch.stack([outputs[first - 1] for outputs in inner]).detach()
        h = h.clone().requires_grad_()
        out = stack.reference(h, params=params, first=first, stages=True, features=first == 0)
        if first == 0:
            features = torch.stack([Tap(t, True, False)(x[i])[1] for i, t in enumerate(teachers)])
            torch.testing.assert_close(out.features_KBF, features, rtol=1e-9, atol=1e-9)
        out.logits_KBC.square().sum().backward()  # reaches every leaf that it can
        plain = h.detach().requires_grad_()
        logits = torch.stack([compose(t, plain[i], first)[-1] for i, t in enumerate(teachers)])
        (expected,) = torch.autograd.grad(logits.square().sum(), plain)
        torch.testing.assert_close(out.logits_KBC, logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(h.grad, expected, rtol=1e-8, atol=1e-9)
        assert len(out.stages) == len(inner[0]) - first
    assert net.training
    assert all(p.grad is None for p in [*net.parameters(), *stack.leaves.values()])
