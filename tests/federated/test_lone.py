"""A client that trains alone takes shorter ways, which end in the same bits."""

from functools import partial

import numpy as np
import pytest
import torch
from conftest import calls_of
from harness import ArrayData, Spy, make_net, random_federation, sgd, train_rounds
from torch import nn

from gcfed.federated.engine import client
from gcfed.federated.network.running import LoneClient
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.training import memory
from gcfed.federated.training.solver import LocalSolver
from gcfed.methods.objective.proximal import Proximal
from gcfed.tasks import Classification, SquaredError


class Looks(Spy):
    """Looks at the gradients of each step, so that they must be in the leaves."""

    def on_after_backward(self, trainer, pl_module):
        assert pl_module.clients.with_grads()[0]


class OwnMean(Classification):
    """A user's loss that replaces the mean."""

    def mean_losses(self, outputs, batch):
        return 2 * batch.mean(self.client_losses(outputs, batch.y))


class OwnLosses(Classification):
    """A user's loss of each label."""

    def losses(self, outputs, y):
        return outputs.logsumexp(-1) - outputs[..., 0] * y


def images():
    """Images in channels_last, and a network for them."""
    data = random_federation(features=3 * 4 * 4)
    data.x = data.x.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    return data


def with_convolution():
    torch.default_generator.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4)).double()
    return net.to(memory_format=torch.channels_last)


def regression():
    data = random_federation()
    return ArrayData(data.x, data.x[:, :4].clone(), data.clients)


@pytest.fixture
def taken(monkeypatch):
    """Lists the steps whose gradients go to the optimizer's kernel directly."""
    return calls_of(monkeypatch, LoneClient, "gradients")


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize(
    ("make_data", "make", "task", "optimizer"),
    [
        (random_federation, make_net, Classification(), SGD),
        (random_federation, make_net, OwnMean(), partial(torch.optim.Adam, lr=0.1)),
        (random_federation, make_net, OwnLosses(), SGD),
        (regression, make_net, SquaredError(), partial(torch.optim.SGD, lr=0.1)),
        (images, with_convolution, Classification(), SGD),
    ],
)
def test_gradients_that_nobody_sees_make_the_same_steps(make_data, make, task, optimizer, taken):
    ends = []
    steps = []
    for methods in ([], [Looks()]):
        net = make()
        rows = []
        solver = LocalSolver(optimizer, epochs=2, batch_size=4)
        end = train_rounds(
            net,
            make_data(),
            solver,
            rounds=2,
            methods=methods,
            task=task,
            on_round=lambda round, row, rows=rows: rows.append((row["train/loss"], round.steps)),
        )
        ends.append((end, rows))
        steps.append(len(taken))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    # All steps without a listener, and none with it.
    assert steps == [sum(num_steps for _, num_steps in ends[0][1])] * 2


@pytest.mark.parametrize(
    ("solver", "methods"),
    [
        (sgd(clip_norm=0.5), []),
        (sgd(accumulate=2), []),
        (sgd(), [Proximal(0.1)]),
        (LocalSolver(partial(torch.optim.SGD, lr=0.1, fused=False)), []),
    ],
)
def test_gradients_that_somebody_sees_are_in_the_leaves(federation, solver, methods, taken):
    train_rounds(make_net(), federation, solver, rounds=1, methods=methods)
    assert not taken


def test_the_last_client_of_a_stack_goes_on_alone(taken):
    """With the same bits as if it had trained with the others."""
    data = random_federation(sizes=(8, 8, 24))
    end = train_rounds(make_net(), data, sgd(momentum=0.9), rounds=1, k=3)
    assert len(taken) == 8  # of its 12 steps, those after the others' 4
    seen = train_rounds(make_net(), data, sgd(momentum=0.9), rounds=1, k=3, methods=[Looks()])
    assert torch.equal(end, seen)
    alone = train_rounds(make_net(), data, sgd(momentum=0.9), rounds=1)
    np.testing.assert_allclose(end.numpy(), alone.numpy(), rtol=1e-12, atol=1e-12)


def test_batches_are_drawn_for_several_stacks_before_the_first_trains(federation, monkeypatch):
    events = []
    for name in ("plan", "train"):
        own = getattr(LocalSolver, name)
        monkeypatch.setattr(
            LocalSolver,
            name,
            lambda *args, name=name, own=own: events.append(name) or own(*args),
        )
    monkeypatch.setattr(client, "STACKS_AHEAD", 2)
    train_rounds(make_net(), federation, sgd(), rounds=1, cohort_of=5)
    assert events == ["plan", "plan", "train", "train"] * 2 + ["plan", "train"]


class Reads(Spy):
    """Makes steps depend on a tensor of their own stack."""

    recordable = "run"

    def prepare(self, stack, own, download):
        return {"pull": stack.full["0.weight"].clone()}

    def on_after_backward(self, trainer, pl_module):
        stack = pl_module.clients
        pull = stack.prepared[self]["pull"][: stack.active]
        leaf = stack.leaves["0.weight"]
        leaf.grad.add_(leaf.detach() - pull)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.AdamW, lr=0.1)])
@pytest.mark.parametrize("methods", [[], [Reads()]])
def test_stacks_of_a_round_use_one_memory(k, optimizer, methods, federation, monkeypatch):
    """With the same bits as in memory of their own. Five clients make stacks of two values of K."""
    made = calls_of(monkeypatch, ClientStack, "__init__")
    ends = []
    numbers = []
    for small in (memory.SMALL, 0):
        monkeypatch.setattr(memory, "SMALL", small)
        made.clear()
        solver = LocalSolver(optimizer, epochs=2, batch_size=4, lr_decay=0.9)
        ends.append(
            train_rounds(
                make_net(), federation, solver, rounds=3, methods=methods, k=k, cohort_of=5
            )
        )
        numbers.append(len(made))
    assert torch.equal(*ends)
    stacks, values_of_k = (5, 1) if k == 1 else (3, 2)
    assert numbers == [3 * values_of_k, 3 * stacks]


def test_a_network_with_new_tensors_gets_a_new_stack(federation, monkeypatch):
    """Its old leaves would train memory that the network no longer has."""
    ends = []
    for small in (memory.SMALL, 0):
        monkeypatch.setattr(memory, "SMALL", small)
        net = make_net()

        class Renews(Spy):
            def on_clients_end(self, stack, download, net=net):
                stack.lent_network.take_back()
                net[0].weight = nn.Parameter(net[0].weight.detach().clone())

        ends.append(train_rounds(net, federation, sgd(), rounds=2, methods=[Renews()]))
    assert torch.equal(*ends)
