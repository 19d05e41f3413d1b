"""Optimizers from the config: refused settings, and the faster fused forms."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from gcfed.optim.partial import fused, is_elementwise, try_optimizer, unprofiled_step
from gcfed.utils.instantiate import BuildError


def test_optimizers_that_cannot_train_are_refused_by_their_key():
    for settings, message in (
        ({"nesterov": True}, "Nesterov momentum"),
        ({"betas": (0.9, 0.9)}, ".*argument 'betas'"),
        ({"momentum": float("nan")}, "momentum=nan is not finite"),
    ):
        with pytest.raises(BuildError, match=rf"^server: {message}"):
            try_optimizer(partial(SGD, lr=1.0, **settings), "server")
    # they need a closure, or sparse gradients
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(BuildError, match=r"^server: "):
            try_optimizer(cls, "server")


def sgd_after(edit):
    def make(params):
        optimizer = SGD(params, lr=1e-5)
        optimizer.register_step_pre_hook(
            lambda *_: (edit(optimizer.param_groups[0]["params"][0].grad), None)[1]
        )
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *[
            (partial(getattr(torch.optim, name), lr=0.1), True)
            for name in ("Adam", "Adagrad", "NAdam", "Rprop", "ASGD")
        ],
        (sgd_after(lambda g: g.add_(torch.randn_like(g))), True),
        (sgd_after(lambda g: g.div_(g.norm())), False),
        (sgd_after(lambda g: g.sub_(g.mean(-1, True)) if g.dim() > 1 else g), False),
        (torch.optim.Adafactor, False),
    ],
)
def test_optimizers_that_mix_stacked_clients_are_found(make, expected):
    assert is_elementwise(make) == expected


@pytest.mark.parametrize(
    "cls", [SGD, partial(SGD, lr=0.1), partial(partial(SGD, lr=0.1), momentum=0.9)]
)
def test_the_fused_form_is_used_unless_the_user_chose_another(cls):
    assert fused(cls).keywords["fused"] is True
    for choice in ({"foreach": False}, {"fused": False}, {"differentiable": True}):
        chosen = partial(cls, **choice)
        assert fused(chosen) is chosen
    assert fused(torch.optim.Rprop) is torch.optim.Rprop  # it has no fused form


@pytest.mark.parametrize(
    ("settings", "collected"),
    [
        ({}, 0),
        ({"momentum": 0.9, "weight_decay": 0.1}, 0),
        ({"momentum": 0.9, "nesterov": True, "maximize": True}, 0),
        ({"momentum": 0.5, "dampening": 0.3}, 0),
        ({"momentum": 0.9, "fused": False}, 4),
    ],
)
def test_a_step_without_its_overhead_computes_the_same(settings, collected):
    """Each step has another learning rate. torch itself collects the tensors in ``collected`` of
    four steps.
    """
    weights = [
        [torch.nn.Parameter(torch.arange(3.0)), torch.nn.Parameter(torch.ones(2, 2))]
        for _ in range(2)
    ]
    plain, ours = (SGD(own, lr=0.5, **{"fused": True} | settings) for own in weights)
    collect, calls = ours._init_group, []
    ours._init_group = lambda *args: calls.append(args) or collect(*args)
    for step, optimizer in ((plain.step, plain), (unprofiled_step(ours), ours)):
        for t in range(1, 5):
            group = optimizer.param_groups[0]
            group["lr"] = 0.5 / t
            for weight in group["params"]:
                weight.grad = torch.full_like(weight, t**2)
            step()
    assert all(map(torch.equal, *weights))
    assert not torch.equal(weights[0][1], torch.ones(2, 2))
    assert len(calls) == collected


def test_a_parameter_without_a_gradient_keeps_its_value():
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    step = unprofiled_step(SGD([used, unused], lr=0.5, momentum=0.9, fused=True))
    for _ in range(3):
        used.grad = torch.arange(3.0)
        step()
    assert unused.tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(used, 1 - 0.5 * (1 + 1.9 + 2.71) * torch.arange(3.0))
