"""A recorded step is the step, bit for bit; of every algorithm, methods/test_contract.py says so."""

import weakref
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import Spy, make_download, make_net, sgd
from lightning.pytorch import Callback
from omegaconf import open_dict
from tapes import Twice, train_twice

from benchmarks.tape import Tape
from gcfed.data.augment import ImageTransform
from gcfed.federated import solver
from gcfed.federated.batches import BatchPlan
from gcfed.federated.graphs import recorder
from gcfed.federated.graphs.recorder import RecordedSteps, Recorder
from gcfed.federated.stack import ClientStack, broadcast_state
from gcfed.methods.proximal import Proximal
from gcfed.run import train
from gcfed.runs.folder import new_folder

TINY = (
    "model.hidden=[12,8]", "rounds=2", "participation.num_clients=7", "participation.per_round=5", "client.epochs=3",
    "client.batch_size=8", "data.limit_train=100", "data.limit_test=20", "data.transform.crop_padding=1",
    "eval_every=2", "callbacks.checkpoint.every=9", "precision=64-true",
)  # fmt: skip


@pytest.fixture
def twice(config, monkeypatch, tmp_path):
    """Trains as :func:`tapes.train_twice`: whether the numbers are the same, and the kinds of the steps played."""

    def run(*overrides, model=None, method=None):
        words = (*(o for o in TINY if model is None or not o.startswith("model.")), *overrides)
        cfg = config(*words, folder=new_folder(tmp_path / "run"))
        with open_dict(cfg):
            if model is not None:
                cfg.model = {"_target_": model}
            if method is not None:
                cfg.callbacks["method"] = {"_target_": method}
        return train_twice(monkeypatch, cfg)[1:]

    return run


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bf16-mixed",), ("client=adam",), ("client.clip_norm=1",), ("client.lr_decay=0.5", "client.stack=5"),
        ("client.last_batch=wrap", "client.steps=9"), ("data.transform.flip=true", "data.transform.rotation=5"),
        ("gc=warmup",),
    ],
)  # fmt: skip
def test_every_setting_can_be_recorded(twice, overrides):
    same, played = twice(*overrides)
    assert same
    assert played


class WithDropout(torch.nn.Sequential):
    """And statistics of batches."""

    def __init__(self):
        layers = torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 10)
        super().__init__(torch.nn.Flatten(), *layers)


def test_dropout_and_statistics_of_batches_can_be_recorded(twice):
    same, played = twice("gc=none", "client.last_batch=wrap", model=f"{__name__}.WithDropout")
    assert same
    assert played


# ------------------------------------------------------------------------ what is recorded of one stack for the next
EVEN = ("client.last_batch=wrap", "client.steps=4", "participation.per_round=4", "rounds=3")


@pytest.mark.parametrize(
    ("overrides", "once"),
    [
        ((), True), (("client=adam",), True), (("algorithm=fedmlb", "client.stack=2"), True),
        (("algorithm=scaffold",), True), (("algorithm=feddyn", "client.stack=2"), True),
        (("client.lr_decay=0.5",), False),  # a recording knows the learning rate,
        (("gc.local_rounds=2",), False),  # whether there is Local GC,
        (("algorithm=moon",), False),  # whether a client has been there before,
        (("+client.optimizer.dampening=0.5",), False),  # and that there is momentum
    ],
)  # fmt: skip
def test_what_is_recorded_of_one_stack_serves_the_next(twice, monkeypatch, overrides, once):
    recorded, record = [], Tape.record
    monkeypatch.setattr(Tape, "record", lambda tape, step: (recorded.append(0), record(tape, step))[1])
    same, played = twice(*EVEN, *overrides)
    stacks = 12 // (2 if "client.stack=2" in overrides else 1)
    assert same
    assert (len(recorded) == 1) == once
    if once:  # of the first stack a step is launched and one is recorded; all others are played
        assert len(played) == 4 * stacks - 2


class Inherits(Proximal):
    """Of a class whose recordings last, and its own class does not say so: it reads what lies elsewhere each time."""

    def prepare(self, stack, own, download):
        self.anchor = {name: t * 0.5 for name, t in stack.start.items()}

    def on_after_backward(self, trainer, pl_module):
        grads, weights, anchor = pl_module.clients.with_grads(pl_module.clients.full, self.anchor)
        torch._foreach_add_(grads, torch._foreach_sub(weights, anchor), alpha=self.mu)


def test_that_recordings_last_is_not_inherited(twice):
    assert Inherits.lasting
    assert twice(*EVEN, method=f"{__name__}.Inherits")[0]


def test_a_place_that_gives_way_gives_its_memory_back_at_once(federation):
    """Python's collector of cycles knows nothing of a GPU's memory. Two sizes of stacks have a place, a third comes."""
    client, tape, places = sgd(), Recorder(Tape()), []
    make = partial(ClientStack, net := make_net())
    for k in (1, 2, 1, 3):
        download = make_download(broadcast_state(net), lr=0.1, cohort=range(k))
        plan = client.plan(federation, np.arange(k), download, torch.device("cpu"))
        place = client.begin(make, download, np.arange(k), plan, federation, tape, lasting=True)
        place.first_done()
        places.append(weakref.ref(place))
        del place
    assert [ref() is not None for ref in places] == [True, False, True, True]
    assert places[0]() is places[2]()
    del tape
    assert not any(ref() for ref in places)


def test_few_steps_are_recorded_at_a_time(twice, monkeypatch):
    monkeypatch.setattr(recorder, "MOST", 1)
    recorded, record = [], Tape.record
    monkeypatch.setattr(Tape, "record", lambda tape, step: (recorded.append(0), record(tape, step))[1])
    same, _ = twice()
    assert same
    assert len(recorded) > len(set(Twice.recorders[0].graph.played))


# ------------------------------------------------------------------------------------- what must not be recorded
class Counter(Spy):
    """Counts its steps in Python, which a recording freezes."""

    graphable = True

    def prepare(self, stack, own, download):
        self.steps = 0

    def on_after_backward(self, trainer, pl_module):
        self.steps += 1
        for grad in pl_module.clients.grads():
            grad.mul_(self.steps)


class Waiting(Spy):
    """Brings a norm to the host."""

    graphable = True

    def on_after_backward(self, trainer, pl_module):
        for grad in pl_module.clients.grads():
            grad.div_(grad.norm().item())


class FromHost(Spy):
    """Brings a number to the device."""

    graphable = True

    def on_after_backward(self, trainer, pl_module):
        for grad in pl_module.clients.grads():
            grad.mul_(torch.tensor(0.5))


class Silent(Counter):
    """Does not say that it can be recorded."""

    graphable = False


class Listener(Callback):
    """Hears of local steps, and is no method."""

    def on_after_backward(self, trainer, pl_module): ...


def test_a_counter_in_python_would_be_frozen(twice):
    assert not twice(method=f"{__name__}.Counter")[0]


@pytest.mark.parametrize(
    ("method", "message"), [("Waiting", "waits for the device: _local_scalar_dense"), ("FromHost", "from the host")]
)
def test_a_wait_or_a_number_of_the_host_is_named(twice, method, message):
    with pytest.raises(RuntimeError, match=message):
        twice(method=f"{__name__}.{method}")


@pytest.mark.parametrize("method", ["Silent", "Listener"])
def test_who_does_not_say_that_it_can_be_recorded_is_not(twice, method):
    same, played = twice(method=f"{__name__}.{method}")
    assert same
    assert not played


def test_a_step_number_of_the_host_is_named(twice, monkeypatch):
    batch = BatchPlan.batch
    monkeypatch.setattr(BatchPlan, "batch", lambda self, data, step, kind: batch(self, data, int(step), kind))
    with pytest.raises(RuntimeError, match="waits for the device"):
        twice()


def test_the_first_step_of_a_kind_is_not_as_the_others(twice, monkeypatch):
    """Momentum starts with it."""

    def at_once(self, step, t, kind):
        if kind in self._recordings:
            self._recordings[kind]()
        else:
            self._recordings[kind] = self._graph.record(lambda: (step(self._number, kind), self._number.add_(1)))

    monkeypatch.setattr(RecordedSteps, "run", at_once)
    with monkeypatch.context() as patch:
        patch.setattr(ImageTransform, "__call__", lambda self, x, draws, dtype, memory_format: x.to(dtype) / 16)
        assert not twice()[0]


def test_a_stream_of_a_gpu_has_one_recorder_and_the_default_one_has_none(monkeypatch):
    gpu, net, made = torch.device("cuda"), torch.nn.Linear(2, 2), count()
    monkeypatch.setattr(solver, "Recorder", lambda: next(made))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(cuda_stream=0))
    streams = iter((7, 8, 7, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=next(streams)))
    client = sgd()
    assert [client.recorder(net, gpu) for _ in range(4)] == [0, 1, 0, None]
    assert next(made) == 2
    assert client.recorder(net, torch.device("cpu")) is None
    assert client.recorder(torch.nn.LSTM(2, 2), gpu) is None
    assert sgd(graphs=False).recorder(net, gpu) is None


@pytest.mark.parametrize("stack", [1, 3])
def test_gradients_lie_in_memory_as_their_parameters(config, tmp_path, stack):
    """As fused optimizers on a GPU demand, also of convolutions in channels-last order."""
    cfg = config(*TINY[1:], "model=cnn", "channels_last=true", "rounds=1", f"client.stack={stack}", folder=tmp_path)
    with open_dict(cfg):
        cfg.callbacks["strides"] = {"_target_": f"{__name__}.Strides"}
    train(cfg)
    assert Strides.seen
    assert not Strides.odd


class Strides(Spy):
    """Which gradients lie otherwise than their parameters."""

    seen: ClassVar[list[str]] = []
    odd: ClassVar[list[str]] = []

    def on_after_backward(self, trainer, pl_module):
        for name, leaf in pl_module.clients.leaves.items():
            pairs = zip(leaf.stride(), leaf.grad.stride(), leaf.shape, strict=True)
            self.seen.append(name)
            self.odd += [name] * any(a != b and n > 1 for a, b, n in pairs)
