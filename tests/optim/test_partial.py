"""Optimizers from the config: which settings are taken, and which are refused by the key that has to change."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, RMSprop

from gcfed.optim.partial import fused, try_optimizer, unprofiled_step
from gcfed.utils.instantiate import BuildError


@pytest.mark.parametrize(
    ("cls", "name", "taken", "refused"),
    [
        (SGD, "lr", (0.0, 1.0, 5.0), (-0.1, float("nan"), "0.1")),
        (SGD, "weight_decay", (0.0, 1.0, 2.0), (-1e-3, True)),
        (SGD, "momentum", (0.0, 0.999), (1.0, 1.5, -0.1)),  # at 1 nothing would ever fade
        (RMSprop, "alpha", (0.0, 0.99), (1.0,)),
        (Adam, "betas", ((0.9, 0.99), [0.0, 0.5]), ((0.9, 1.0), (0.9,), 0.9)),
        (SGD, "nesterov", (False,), (1, "true")),
        (SGD, "betas", (), ((0.9, 0.99),)),
    ],
)
def test_settings_in_and_out_of_their_range(cls, name, taken, refused):
    for value in taken:
        optimizer = partial(cls, **{"lr": 0.1, name: value})
        assert try_optimizer(optimizer, "client.optimizer") is optimizer
    for value in refused:
        with pytest.raises(BuildError, match=rf"^client\.optimizer\.{name}"):
            try_optimizer(partial(cls, **{"lr": 0.1, name: value}), "client.optimizer")


def test_what_torch_refuses_has_the_key_too():
    with pytest.raises(BuildError, match=r"^server: Nesterov momentum"):
        try_optimizer(partial(SGD, lr=1.0, nesterov=True), "server")
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):  # one needs the loss, the other sparse gradients
        with pytest.raises(BuildError, match=r"^server: "):
            try_optimizer(cls, "server")


@pytest.mark.parametrize("cls", [SGD, partial(SGD, lr=0.1), partial(partial(SGD, lr=0.1), momentum=0.9)])
def test_the_one_pass_form_is_taken_where_the_user_chose_no_other(cls):
    assert fused(cls).keywords["fused"] is True
    for choice in ({"foreach": False}, {"fused": False}, {"differentiable": True}):
        chosen = partial(cls, **choice)
        assert fused(chosen) is chosen
    assert fused(torch.optim.Rprop) is torch.optim.Rprop  # has none


def test_a_step_without_the_profilers_range_is_the_same_step():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for weight, step in zip(weights, (lambda o: o.step, unprofiled_step), strict=True):
        weight.grad = torch.arange(3.0)
        step(SGD([weight], lr=0.5))()
    assert torch.equal(*weights)
    assert weights[0].tolist() == [1.0, 0.5, 0.0]
