"""A network on other tensors than its own, and a client's own copy of it."""

import numpy as np
import pytest
import torch
from torch import nn

from gcfed.federated.forward import Tap
from gcfed.federated.lent import Lent, Traits
from gcfed.federated.stack import ClientStack, broadcast_state, travelling


class Tied(nn.Module):
    """One weight in two modules and in a list, running statistics, and a tensor that does not travel."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.up.weight = self.down.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.kept = [self.down.weight]

    def forward(self, x):
        return nn.functional.linear(self.norm(self.down(x)).relu(), self.kept[0]) + self.shift + 0 * self.up(x)


def test_what_no_checkpoint_has_does_not_travel():
    assert broadcast_state(Tied()).keys() == {
        "down.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }


def test_a_lent_network_has_a_clients_tensors_by_whatever_way_they_are_reached():
    net, x = Tied().double(), torch.randn(5, 4, dtype=torch.float64)
    own = {name: t.clone() for name, t in net.state_dict().items()}
    lent = Lent(net)
    rows = {name: t.detach().clone() for name, t in lent.tensors.items()}
    lent.begin(rows)
    net(x).sum().backward()
    assert net.down.weight.data_ptr() == net.kept[0].data_ptr() == rows["down.weight"].data_ptr()
    assert net.down.weight.grad.abs().sum() > 0
    lent.home()
    assert rows["norm.num_batches_tracked"] == own["norm.num_batches_tracked"] + 1
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, own[name])


class Assigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.fc, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.mean, self.steps = 0.5 * self.mean + 0.5 * x.detach().mean(0), self.steps + 1
            for t, s in zip(self.teacher.parameters(), self.fc.parameters(), strict=True):
                t.data = t.data + s.data
        return self.fc(x - self.mean) + self.teacher(x)


def test_buffers_that_forward_assigns_are_the_clients_and_the_next_begins_anew():
    net, x = Assigns(), torch.randn(1, 5, 4)
    moved = ["steps", "teacher.weight", "teacher.bias"]
    start, taught = broadcast_state(net, [*travelling(net), *moved]), net.teacher.weight.clone()
    lent, means = Lent(net, Traits(moved=tuple(moved))), []
    for _ in range(2):
        stack = ClientStack(net, start, np.arange(1), np.ones(1), np.ones(1), lent=lent)
        assert torch.equal(net.teacher.weight, taught)
        for _ in range(3):
            stack(x)
        stack.settle()
        means.append(stack.full["mean"].clone())
        assert stack.full["steps"].tolist() == [3]
        assert not torch.equal(stack.full["teacher.weight"][0], taught)
        stack.delta()
    assert torch.equal(*means)
    assert torch.allclose(means[0][0], x.mean((0, 1)) * 0.875)
    assert torch.equal(net.teacher.weight, taught)
    assert net.steps == 0


def test_side_by_side_assigned_buffers_are_each_clients():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return self.fc(x - self.mean)

    net, x = Two(), torch.randn(2, 5, 4)
    start, ones = broadcast_state(net), np.ones(2)
    both = ClientStack(net, start, np.arange(2), ones, ones)
    both(x)
    out = both(x).logits_KBC
    for k in range(2):
        one = ClientStack(net, start, np.arange(1), ones[:1], ones[:1])
        one(x[k : k + 1])
        assert torch.allclose(one(x[k : k + 1]).logits_KBC[0], out[k], atol=1e-6)
        one.settle()
        assert torch.allclose(one.full["mean"][0], both.full["mean"][k], atol=1e-6)


def test_the_network_has_its_own_again_after_an_error():
    net = nn.Linear(2, 3)
    own = dict(net.named_parameters())
    with pytest.raises(RuntimeError):
        Tap(net, False, False).on({"weight": torch.zeros(7, 7), "bias": torch.zeros(3)}, torch.ones(1, 2))
    assert dict(net.named_parameters()) == own


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


def test_the_next_client_in_the_same_memory_begins_as_the_first_one_did():
    """With what was sent and with the network's own values of what was not."""
    net, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(1, 5, 4)
    net.register_buffer("mask", torch.ones(3), persistent=False)
    start, ones = broadcast_state(net), np.ones(1)
    stack = ClientStack(net, start, np.arange(1), ones, ones)
    stack(x)
    net.mask.mul_(2)
    other = {name: t + 1 for name, t in start.items()}
    stack.load(other, np.array([7]), ones, ones)
    fresh = ClientStack(net, other, np.array([7]), ones, ones)
    for tensors, expected in ((stack.full, fresh.full), (stack._buffers, fresh._buffers)):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(t, expected[name]) for name, t in tensors.items())
    assert stack._buffers["1.num_batches_tracked"].tolist() == [0]
    fresh.end()
