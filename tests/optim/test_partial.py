"""Optimizers from the config: refused settings, and the faster fused forms."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from gcfed.optim.partial import fused, try_optimizer, unprofiled_step
from gcfed.utils.instantiate import BuildError


def test_optimizers_that_cannot_train_are_refused_by_their_key():
    for settings, message in (
        ({"nesterov": True}, "Nesterov momentum"), ({"betas": (0.9, 0.9)}, ".*argument 'betas'"),
        ({"momentum": float("nan")}, "momentum=nan is not finite"),
    ):  # fmt: skip
        with pytest.raises(BuildError, match=rf"^server: {message}"):
            try_optimizer(partial(SGD, lr=1.0, **settings), "server")
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):  # they need a closure, or sparse gradients
        with pytest.raises(BuildError, match=r"^server: "):
            try_optimizer(cls, "server")


@pytest.mark.parametrize("cls", [SGD, partial(SGD, lr=0.1), partial(partial(SGD, lr=0.1), momentum=0.9)])
def test_the_fused_form_is_used_unless_the_user_chose_another(cls):
    assert fused(cls).keywords["fused"] is True
    for choice in ({"foreach": False}, {"fused": False}, {"differentiable": True}):
        chosen = partial(cls, **choice)
        assert fused(chosen) is chosen
    assert fused(torch.optim.Rprop) is torch.optim.Rprop  # it has no fused form


def test_a_step_without_the_profilers_range_computes_the_same():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for weight, step in zip(weights, (lambda o: o.step, unprofiled_step), strict=True):
        weight.grad = torch.arange(3.0)
        step(SGD([weight], lr=0.5))()
    assert torch.equal(*weights)
    assert weights[0].tolist() == [1.0, 0.5, 0.0]
