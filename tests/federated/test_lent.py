"""A network that uses a client's tensors, and a stack of one client."""

import numpy as np
import torch
from torch import nn

from gcfed.federated.training.lent import Lent, broadcast_state, travelling
from gcfed.federated.training.stack import ClientStack


class Tied(nn.Module):
    """Has one weight in two modules and in a list, running statistics, and a buffer that clients do not send."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.up.weight = self.down.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.kept = [self.down.weight]

    def forward(self, x):
        return nn.functional.linear(self.norm(self.down(x)).relu(), self.kept[0]) + self.shift + 0 * self.up(x)


def test_tensors_that_checkpoints_lack_are_not_sent():
    norm = {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert broadcast_state(Tied()).keys() == {"down.weight", *norm}


def test_a_lent_network_uses_a_clients_tensors_everywhere():
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


def test_the_next_client_in_the_same_memory_starts_as_in_a_new_stack():
    """It has the broadcast tensors. Other tensors have the network's own values."""
    net, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(1, 5, 4)
    net.register_buffer("mask", torch.ones(3), persistent=False)
    start, ones = broadcast_state(net, [*travelling(net), "1.num_batches_tracked"]), np.ones(1)
    stack = ClientStack(net, start, np.arange(1), ones, ones)
    stack(x)
    net.mask.mul_(2)
    other = {name: t + 1 for name, t in start.items()}
    stack.load(other, np.array([7]), ones, ones)
    fresh = ClientStack(net, other, np.array([7]), ones, ones)
    for tensors, expected in ((stack.full, fresh.full), (stack._buffers, fresh._buffers)):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(t, expected[name]) for name, t in tensors.items())
    assert stack._buffers["1.num_batches_tracked"].tolist() == [1]  # other is start + 1
    fresh.end()
