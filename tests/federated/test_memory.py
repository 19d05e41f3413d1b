"""Which stacks train in the memory of an earlier one. test_lone.py compares their numbers."""

import weakref
from functools import partial

import numpy as np
import pytest
import torch
from harness import make_download, make_net, random_federation, sgd, train_rounds

from gcfed.federated.network.lent_network import travelling_state
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.stack import StackStart
from gcfed.federated.parts import ClientPart, ServerPart
from gcfed.federated.training.memory import TrainingMemory

PLAIN_SERVER = partial(torch.optim.SGD, lr=1.0)


@pytest.fixture
def begin():
    """Begins a stack; returns its training."""
    net = make_net()
    data = random_federation()
    solver = sgd()
    memory = TrainingMemory(FederatedModule(net, PLAIN_SERVER), data, solver)
    model = travelling_state(net)
    memory.begin_round(model, 1.0)

    def begin(clients, recordable="run", reads=frozenset()):
        clients = np.array(clients)
        plan = solver.plan(data, clients, make_download(model), torch.device("cpu"))
        return memory.begin_training(
            StackStart(model, clients, data.sizes(clients), plan.steps), plan, recordable, reads
        )

    begin.next_round = lambda: memory.begin_round(model, 1.0)
    return begin


def test_a_stack_of_as_many_clients_trains_in_the_same_memory(begin):
    training = begin([0])
    assert begin([1]) is training
    assert training.stack.clients.tolist() == [1]
    assert begin([1, 2]) is not training


def test_memory_lasts_for_a_round(begin):
    training = begin([0])
    begin.next_round()
    assert begin([0]) is not training


@pytest.mark.parametrize("recordable", ["", "stack"])
def test_methods_that_read_other_memory_get_new_memory(begin, recordable):
    assert begin([0], recordable) is not begin([0], recordable)


def test_a_forward_pass_that_returns_other_things_has_its_own_memory(begin):
    """As in a rehearsal, which leaves out the parts that measure."""
    assert begin([0], reads=frozenset({"features"})) is not begin([0])


class Weak(ServerPart):
    """Looks at each round's beginning whether the last broadcast model is still there."""

    def __init__(self):
        self.last = []
        self.left = []

    def on_broadcast(self, download, round):
        self.left.append(sum(reference() is not None for reference in self.last))
        self.last = [weakref.ref(t) for t in download.broadcast_model.values()]


class Hears(ClientPart):
    """For its sake, clients that have uploaded wait for the server's reply."""

    def on_reply(self, reply, own, download): ...


class Replies(ServerPart):
    def on_aggregate_end(self, update, round):
        round.reply["nothing"] = {}


@pytest.mark.parametrize("methods", [[], [Hears(), Replies()], [Hears()]])
def test_no_round_keeps_the_broadcast_model(methods, monkeypatch):
    """The memory of a small model's stacks does, on a CPU."""
    monkeypatch.setattr("gcfed.federated.training.memory.SMALL", 0)
    weak = Weak()
    train_rounds(rounds=3, methods=[weak, *methods])
    assert weak.left == [0, 0, 0]
