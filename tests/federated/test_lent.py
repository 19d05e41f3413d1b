"""The tensors that clients receive, and a stack of one client."""

import gc

import numpy as np
import pytest
import torch
from harness import stack_of
from torch import nn

from gcfed.federated.network.lent_network import LentNetwork, travelling, travelling_state
from gcfed.federated.network.stack import ClientStack, StackStart


def test_tensors_that_checkpoints_lack_are_not_sent():
    net = nn.BatchNorm1d(4)
    net.register_buffer("shift", torch.ones(4), persistent=False)
    assert travelling_state(net).keys() == {"weight", "bias", "running_mean", "running_var"}


def test_the_next_client_in_the_same_memory_starts_as_in_a_new_stack():
    """It has the broadcast tensors. Other tensors have the network's own values."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    x = torch.randn(1, 5, 4)
    net.register_buffer("mask", torch.ones(3), persistent=False)
    start = travelling_state(net, [*travelling(net), "1.num_batches_tracked"])
    ones = np.ones(1)
    stack = ClientStack(net, StackStart(start, np.arange(1), ones, ones))
    stack(x)
    stack.end()
    net.mask.mul_(2)
    other = {name: t + 1 for name, t in start.items()}
    stack.load(StackStart(other, np.array([7]), ones, ones))
    fresh = ClientStack(net, StackStart(other, np.array([7]), ones, ones))
    buffers = stack._tensors.buffers
    for tensors, expected in ((stack.full, fresh.full), (buffers, fresh._tensors.buffers)):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(t, expected[name]) for name, t in tensors.items())
    assert buffers["1.num_batches_tracked"].tolist() == [1]  # other is start + 1
    fresh.lent_network.take_back()


def test_a_forgotten_loan_ends_only_with_the_next_one():
    """The garbage collector may come while another client has the network."""
    net = nn.Linear(2, 2)
    rows = {"weight": torch.zeros(2, 2)}
    forgotten = LentNetwork(net)
    other = LentNetwork(net)
    forgotten.lend(rows)
    other.lend({"weight": torch.ones(2, 2)})
    del forgotten
    gc.collect()
    assert net.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_changed_constant_is_found_when_a_client_of_a_stack_finishes():
    net = nn.Linear(4, 3)
    net.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
    stack = stack_of(net, 2)
    net.flag.fill_(True)
    with pytest.raises(ValueError, match="forward changes flag in some steps only"):
        stack.shrink(1)
