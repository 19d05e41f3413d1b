"""FedSAM and FedSOL restore the weights bit for bit; ``test_sam_family.py`` has their rules."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import refuses
from harness import (
    CPU,
    make_download,
    make_net,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
    with_batch_norm,
)

from gcfed.federated.network.lent_network import travelling, travelling_state
from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.federated.parts.refusals import validate_parts
from gcfed.federated.training.hooks import StepHooks
from gcfed.federated.training.objective import LocalObjective
from gcfed.methods.sharpness.fedsol import FedSol
from gcfed.methods.sharpness.sam import Sam


@pytest.mark.parametrize("method", [Sam(0.7), FedSol(0.7)])
def test_weights_and_running_statistics_are_restored(federation, method):
    """The weights before the first pass and the statistics after it are restored.

    Frozen ones do not change.
    """
    net = with_batch_norm()
    net[2].bias.requires_grad_(False)
    start = travelling_state(net, [*travelling(net), "1.num_batches_tracked"])
    stack = ClientStack(net, StackStart(start, np.arange(1), np.ones(1), np.ones(1)))
    for leaf in stack.leaves.values():
        leaf.data += 0.1 * torch.randn_like(leaf)
    plan = sgd().plan(federation, np.arange(1), make_download(start), CPU)
    batch = plan.batch(federation, 0, plan.kinds[0])
    before = {name: t.clone() for name, t in stack.full.items()}
    frozen = net[2].bias.clone()
    objective = LocalObjective(stack, StepHooks())
    method.before_step(stack, batch, lambda: objective.losses_of_clients(batch)[1])
    moved = {name for name, leaf in stack.leaves.items() if not torch.equal(leaf, before[name])}
    assert {"0.weight", "2.weight"} <= moved
    assert torch.equal(net[2].bias, frozen)
    once = stack.full["1.running_mean"].clone()
    assert not torch.equal(once, before["1.running_mean"])
    stack.backward(objective.losses_of_clients(batch)[1])
    assert not torch.equal(stack.full["1.running_mean"], once)
    method.on_after_backward(None, SimpleNamespace(clients=stack))
    assert torch.equal(stack.full["1.running_mean"], once)
    assert all(torch.equal(leaf, before[name]) for name, leaf in stack.leaves.items())


def test_impossible_settings_are_refused_by_name():
    with refuses(r"alpha=0\.3 needs direction=own"):
        Sam(direction="last_update", alpha=0.3)
    with refuses(r"methods: Sam and FedSol"):
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
    """With ρ = 0, weights and buffers equal FedAvg's, also counts and buffers that ``forward``
    replaces.
    """
    found = []
    for methods in ([], [Sam(0.0)]):
        first, _, last = make_net()
        middle = (
            [Counted()] if k > 1 else [Counted(), torch.nn.BatchNorm1d(5, momentum=None).double()]
        )
        net = torch.nn.Sequential(first, *middle, last)
        train_rounds(
            net, random_federation(sizes=(10, 12, 8)), sgd(), rounds=2, methods=methods, k=k
        )
        found.append([t.double() for t in (*net.parameters(), *net.buffers())])
    assert all(map(torch.equal, *found))
