"""A network on other tensors than its own, against ``torch.func.functional_call``."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from gcfed.federated.forward import Swap
from gcfed.federated.stack import ClientStack, broadcast_state


class Tied(nn.Module):
    """One weight in two modules, running statistics, and a tensor that nobody replaces."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.up.weight = self.down.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.up(self.norm(self.down(x)).relu()) + self.shift


def test_what_no_checkpoint_has_does_not_travel():
    assert broadcast_state(Tied()).keys() == {
        "down.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }


def test_it_is_functional_call_with_tied_weights_and_buffers():
    torch.manual_seed(0)
    net, x = Tied().double(), torch.randn(5, 4, dtype=torch.float64)
    own = {name: t.clone() for name, t in net.state_dict().items()}
    given = {name: torch.randn_like(t).requires_grad_() for name, t in net.named_parameters()}
    buffers = {name: t.clone() + 1 for name, t in net.named_buffers() if name != "shift"}
    expected = functional_call(net, given | {name: t.clone() for name, t in buffers.items()}, (x,))
    with Swap(net).holding(given | buffers):
        out = net(x)
    assert torch.equal(out, expected)
    assert "up.weight" not in dict(net.named_parameters())  # it is down.weight, and both were replaced
    (grad,) = torch.autograd.grad(out.sum(), given["down.weight"])
    assert grad.abs().sum() > 0
    assert buffers["norm.num_batches_tracked"] == own["norm.num_batches_tracked"] + 2  # counted in what was given
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, own[name])


def test_the_network_has_its_own_again_after_an_error():
    net = nn.Linear(2, 3)
    own = dict(net.named_parameters())
    with pytest.raises(RuntimeError), Swap(net).holding({"weight": torch.zeros(7, 7), "bias": torch.zeros(3)}):
        net(torch.ones(1, 2))
    assert dict(net.named_parameters()) == own


def test_a_call_within_a_call_comes_back_to_the_outer_tensors():
    net = nn.Linear(1, 1, bias=False)
    swap = Swap(net)
    with swap.holding({"weight": torch.full((1, 1), 2.0)}):
        with swap.holding({"weight": torch.full((1, 1), 5.0)}):
            assert net(torch.ones(1)) == 5
        assert net(torch.ones(1)) == 2


def test_a_teacher_drops_nothing_whatever_kind_of_module_would():
    """A module of the user's own may ask for its mode in ways that nobody can see."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x):
            return self.fc(nn.functional.dropout(x, 0.5, self.training))

    for net in (Own(), nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4))):
        stack = ClientStack(net.train(), broadcast_state(net), np.arange(1), np.ones(1), np.ones(1))
        x = torch.randn(1, 9, 6)
        taught = stack.reference(x).logits_KBC
        assert net.training
        assert torch.equal(taught[0], net.eval()(x[0]))
