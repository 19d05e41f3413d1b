"""The order of stacks' operations on the streams of a GPU. The streams here only record it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from harness import Spy, train_rounds

from gcfed.aggregators.mean import MeanSum
from gcfed.federated.engine.layout import Layout
from gcfed.federated.engine.simulation import Simulation
from gcfed.federated.parts import Order
from gcfed.federated.training.memory import TrainingMemory
from gcfed.federated.training.solver import LocalSolver
from gcfed.metrics.updates import Drift
from gcfed.run import train


class Stream:
    """Records the operations before its next one: its own earlier ones, and those that it waited
    for.
    """

    def __init__(self, device=None):
        self.done = []

    def wait_stream(self, other):
        self.done += [what for what in other.done if what not in self.done]


@pytest.fixture
def before(monkeypatch):
    """{operation: operations before it}. ``before.do(name)`` does one on the current stream."""

    class Before(dict):
        stream = Stream()

        def do(self, what):
            self[what] = tuple(self.stream.done)
            self.stream.done.append(what)

    before = Before()

    @contextmanager
    def on(stream):
        outer = before.stream
        before.stream = stream
        yield
        before.stream = outer

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: before.stream)
    return before


def test_stacks_train_concurrently_and_are_received_one_after_another(config, before, monkeypatch):
    monkeypatch.setattr(Simulation, "layout", Layout(1, torch.device("cuda"), 2))

    def counted(owner, name, what):
        plain = getattr(owner, name)
        calls = iter(range(1, 9))

        def method(*args, **kwargs):
            before.do(f"{what} {next(calls)}")
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, method)

    counted(LocalSolver, "train", "train")
    counted(Drift, "on_clients_end", "measure")
    counted(MeanSum, "add", "receive")
    train(config("rounds=1", "participation.per_round=4", "metrics=drift", "metrics.drift.every=1"))
    before.do("aggregate")
    assert before["train 1"] == before["train 2"] == ()
    first = {"train 1", "measure 1", "receive 1"}
    # the second stack of the first stream, whose memory is free
    assert set(before["train 3"]) == first
    for i in (2, 3, 4):
        assert {f"train {i}", f"measure {i - 1}", f"receive {i - 1}"} <= set(before[f"measure {i}"])
        assert f"measure {i}" in before[f"receive {i}"]
    assert {f"{what} {i}" for what in ("train", "measure", "receive") for i in (1, 2, 3, 4)} <= set(
        before["aggregate"]
    )


class Rehearses(Spy):
    """Rehearses a round with its cohort."""

    facts = {"rehearses"}
    order = Order.MEASURES

    def __init__(self, before):
        self.before = before
        self.streams = set()  # on which it gets uploads

    def bind(self, setup):
        self.transport = setup.transport

    def on_broadcast(self, download, round):
        rehearsed = self.transport.rehearse(download, round.cohort)
        for number, _ in enumerate(rehearsed, start=1):
            self.streams.add(self.before.stream)
            self.before.do(f"read {number}")


def test_a_rehearsal_trains_on_the_streams_of_the_run(before, monkeypatch):
    """There it replays the run's recordings. The round's stream gets its uploads."""
    monkeypatch.setattr(Simulation, "layout", Layout(1, torch.device("cuda"), 2))
    plain = LocalSolver.train
    streams = []

    def train_on_stream(solver, *args):
        streams.append(before.stream)
        before.do(f"train {len(streams)}")
        return plain(solver, *args)

    monkeypatch.setattr(LocalSolver, "train", train_on_stream)
    rehearses = Rehearses(before)
    train_rounds(rounds=1, methods=[rehearses])
    first, second, *_ = streams
    assert first is not second
    assert streams == [first, second, first] * 2
    assert rehearses.streams == {before.stream}
    assert "train 1" in before["read 1"]
    assert {"train 1", "read 1"} <= set(before["train 3"])  # in the memory of the first stack


def memory_on_gpu(module, data, solver):
    """The memory of local training whose network seems to be on a GPU."""
    on_gpu = SimpleNamespace(
        net=module.net,
        task=module.task,
        lent_network=module.lent_network,
        device=torch.device("cuda"),
    )
    return TrainingMemory(on_gpu, data, solver)


def test_two_streams_never_share_the_memory_of_training(config, before, monkeypatch):
    """Steps are not recorded here, and the model is small."""
    monkeypatch.setattr(Simulation, "layout", Layout(1, torch.device("cuda"), 2))
    monkeypatch.setattr("gcfed.federated.engine.client.TrainingMemory", memory_on_gpu)
    plain = LocalSolver.train
    trained = []

    def train_on_stream(solver, training, *args):
        trained.append((training, before.stream))
        return plain(solver, training, *args)

    monkeypatch.setattr(LocalSolver, "train", train_on_stream)
    train(config("rounds=1", "participation.per_round=4", "client.graphs=false"))
    assert len({stream for _, stream in trained}) == 2
    for training, stream in trained:
        assert all(other is stream for same, other in trained if same is training)
