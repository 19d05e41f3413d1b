"""``transport.rehearse`` returns what clients would send, and changes nothing."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import Spy, make_net, sgd, train_rounds

from gcfed.federated.engine.client import ClientRound
from gcfed.federated.parts import ClientPart, KeptState, Order, like_trained
from gcfed.federated.state.store import ClientStores
from gcfed.methods.correction.scaffold import Scaffold


class Rehearses(Spy):
    """Rehearses each round, first with its cohort, then with all clients.

    Compares the cohort's uploads with these. Another solver trains all clients twice: dealt to the
    processes, and on this process.
    """

    order = Order.MEASURES

    def __init__(self):
        self.rehearsed = {}
        self.compared = 0
        self.clients = []

    def bind(self, setup):
        self.transport = setup.transport
        self.solver = sgd(epochs=3)

    def on_broadcast(self, download, round):
        everybody = np.arange(round.num_clients)
        for upload in self.transport.rehearse(download, round.cohort):
            tensors = [*upload.delta.values(), *upload.extra["scaffold"].values()]
            self.rehearsed[tuple(upload.clients)] = [t.clone() for t in tensors]
        assert sorted(k for stack in self.rehearsed for k in stack) == round.cohort.tolist()
        asked = [u.clients for u in self.transport.rehearse(download, everybody)]
        assert sorted(np.concatenate(asked)) == everybody.tolist()
        dealt, here = (self.deltas(download, everybody, here=here) for here in (False, True))
        assert sorted(here) == everybody.tolist()
        assert all(torch.equal(here[client], delta) for client, delta in dealt.items())

    def deltas(self, download, clients, *, here):
        """Δ of each client, in one vector."""
        deltas = {}
        for upload in self.transport.rehearse(download, clients, self.solver, here=here):
            planned = self.solver.num_steps(upload.num_samples)
            assert upload.num_steps.tolist() == planned.tolist()
            for row, client in enumerate(upload.clients.tolist()):
                deltas[client] = torch.cat([t[row].flatten() for t in upload.delta.values()])
        return deltas

    def prepare(self, stack, own, download):
        self.clients.append(len(stack))

    def on_receive(self, upload, round):
        expected = self.rehearsed.pop(tuple(upload.clients))
        sent = [*upload.delta.values(), *upload.extra["scaffold"].values()]
        assert all(torch.equal(a, b) for a, b in zip(sent, expected, strict=True))
        self.compared += len(upload.clients)


class Keeps(ClientPart):
    """Keeps w_k, and counts the clients whose uploads were sent."""

    keeps: ClassVar = {"kept": KeptState(like_trained)}

    def __init__(self):
        self.sent = 0

    def on_clients_end(self, stack, download):
        return {"kept": stack.full}

    def keep(self, upload, own, download):
        self.sent += len(upload.clients)


class Watches(Spy):
    """Measures, and rehearses each round."""

    order = Order.MEASURES

    def bind(self, setup):
        self.transport = setup.transport

    def on_broadcast(self, download, round):
        list(self.transport.rehearse(download, round.cohort))


class WatchesSteps(Watches):
    """Measures in each local step, which a rehearsal leaves out."""

    def calibrate(self, stack, logits_KBC):
        return logits_KBC


class WatchesGradients(Watches):
    """Reads in each local step what it has prepared, which it does not in a rehearsal."""

    def prepare(self, stack, own, download):
        return {"factor": torch.ones(())}

    def on_after_backward(self, trainer, pl_module):
        assert pl_module.clients.prepared[self]["factor"] == 1


@pytest.mark.parametrize(
    ("watches", "is_one"), [(Watches, True), (WatchesSteps, False), (WatchesGradients, False)]
)
def test_a_rehearsal_uses_the_memory_of_equal_steps_only(watches, is_one, monkeypatch):
    """A recording of other steps would call their hooks."""
    plain = ClientRound.train
    memories = []

    def train(round, *args, **kwargs):
        memories.append(round.program.memory)
        return plain(round, *args, **kwargs)

    monkeypatch.setattr(ClientRound, "train", train)
    train_rounds(rounds=1, methods=[watches()])
    rehearsed, *_, trained = memories
    assert (rehearsed is trained) == is_one


def test_rehearsals_equal_uploads_and_change_neither_states_nor_rows(federation, tmp_path):
    """Stacks have two clients or one."""
    found = []
    for name, methods in (("without", []), ("with", [Rehearses()])):
        net = make_net()
        rows = []
        stores = ClientStores(folder=tmp_path / name)
        keeps = Keeps()
        end = train_rounds(
            net,
            rounds=3,
            methods=[Scaffold(), keeps, *methods],
            stores=stores,
            k=2,
            on_round=lambda round, row, rows=rows: rows.append(
                {n: v for n, v in row.items() if "time/" not in n}
            ),
        )
        assert keeps.sent == 3 * 3
        everybody = np.arange(federation.num_clients)
        like = {n: p.detach() for n, p in net.named_parameters()}
        both = ["scaffold", "kept"]
        states = [t for kept in both for t in stores.read(kept, everybody, like).values()]
        found.append((end, rows, states, [stores.versions(kept, everybody) for kept in both]))
    (a, rows, states, versions), (b, others, kept, at) = found
    assert torch.equal(a, b)
    assert rows == others
    assert versions == at
    assert all(map(torch.equal, states, kept))
    assert methods[0].compared == sum(methods[0].clients) == 3 * 3
