"""Recorded steps equal other steps bit for bit. methods/test_contract.py tests this for each
algorithm.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import calls_of
from harness import Spy, make_download, make_net, random_federation, sgd
from lightning.pytorch import Callback
from omegaconf import open_dict
from tapes import Listing, Twice, train_twice

from benchmarks.tape import Tape
from gcfed.federated.training import recorded_training
from gcfed.federated.training.batches import BatchPlan, Kind
from gcfed.federated.training.memory import TrainingMemory
from gcfed.folders.place import new_folder
from gcfed.methods.centralization import LocalGC
from gcfed.methods.objective.proximal import Proximal

TINY = (
    "model.hidden=[12,8]",
    "rounds=2",
    "participation.num_clients=5",
    "participation.per_round=3",
    "client.epochs=3",
    "client.batch_size=8",
    "data.limit_train=70",
    "data.limit_test=20",
    "data.transform.crop_padding=1",
    "eval_every=2",
    "callbacks.checkpoint.every=9",
    "precision=64-true",
)


@pytest.fixture
def twice(config, tmp_path):
    """Trains with :func:`tapes.train_twice`.

    Returns whether the numbers are equal, and the kinds of replayed steps.
    """

    def run(*overrides, model=None, method=None, tolerance=0.0):
        words = (*(o for o in TINY if model is None or not o.startswith("model.")), *overrides)
        cfg = config(*words, folder=new_folder(tmp_path / "run"))
        with open_dict(cfg):
            if model is not None:
                cfg.model = {"_target_": model}
            if method is not None:
                cfg.callbacks["method"] = {"_target_": method}
        return train_twice(cfg, tolerance)[1:]

    return run


class WithDropout(torch.nn.Sequential):
    """It also has a batch normalisation."""

    def __init__(self):
        layers = (
            torch.nn.Linear(64, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 10),
        )
        super().__init__(torch.nn.Flatten(), *layers)


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (("precision=bf16-mixed",), None),
        (
            (
                "client=adam",
                "client.clip_norm=1",
                "client.lr_decay=0.5",
                "client.stack=3",
                "client.accumulate=3",
            ),
            None,
        ),
        (("client.last_batch=wrap",), f"{__name__}.WithDropout"),
        (
            (
                "client.last_batch=wrap",
                "client.steps=9",
                "data.transform.flip=true",
                "data.transform.rotation=5",
            ),
            None,
        ),
    ],
)
def test_every_setting_can_be_recorded(twice, overrides, model):
    same, played = twice("gc=none", *overrides, model=model)
    assert same
    assert played


@pytest.mark.parametrize(
    "how", ["moon", "feddecorr", "fedreg", "fedmlb", "fedsam client.accumulate=5"]
)
def test_padding_changes_the_last_bits_only(twice, how):
    same, played = twice(*f"algorithm={how}".split(), "client.batch_size=12", tolerance=1e-12)
    assert same
    assert {kind.size for kind in played} == {8, 12}


def test_batches_are_not_padded_if_the_network_uses_their_statistics(twice):
    same, played = twice("gc=none", model=f"{__name__}.WithDropout", tolerance=1e-12)
    assert same
    assert all(kind.even for kind in played)


def test_padding_leaves_few_kinds_of_steps():
    sizes = np.arange(51, 100)  # the last batches have 1 … 49 samples
    data = random_federation(sizes)
    plan = sgd(batch_size=50).plan(data, np.arange(49), make_download({}), torch.device("cpu"))
    plans = [BatchPlan(plan.index[k : k + 1], None, plan.counts[k : k + 1]) for k in range(49)]
    kinds = [
        {kind for plan in plans for kind in made(plan).kinds}
        for made in (lambda plan: plan, BatchPlan.padded)
    ]
    assert list(map(len, kinds)) == [50, 8]  # including whole batches


def share_of_replays(make_plan, num_clients, num_rounds):
    """The share of steps that are replayed, in rounds of clients that are drawn anew."""
    rng = np.random.default_rng(1)
    data = random_federation(rng.integers(20, 300, size=400))
    solver = sgd(batch_size=20, epochs=1)
    tape = Listing()
    row = [torch.zeros(num_clients)]
    # It never shrinks.
    stack = SimpleNamespace(leaves={}, prepared={}, active=0, tensors=lambda: row)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    training = None
    num_steps = 0
    for _ in range(num_rounds):
        clients = rng.choice(data.num_clients, num_clients, replace=False)
        clients = clients[np.argsort(-data.sizes(clients))]
        plan = make_plan(solver.plan(data, clients, make_download({}), torch.device("cpu")))
        if training is None:
            training = recorded_training.RecordedTraining(tape, 20, stack, plan, optimizer)
        training._place_plan(plan)
        for t, kind in enumerate(plan.kinds):
            training.run(lambda number, kind: None, t, kind)
        num_steps += len(plan.kinds)
    return len(tape.played) / num_steps


def test_nearly_all_steps_of_a_hundred_clients_are_replayed():
    assert share_of_replays(lambda plan: plan.padded(), 100, 100) < 0.9
    assert share_of_replays(lambda plan: plan.padded().grouped(), 100, 100) > 0.97


MANY = (
    "participation.num_clients=40",
    "participation.per_round=32",
    "client.stack=32",
    "data.limit_train=900",
    "rounds=3",
)


@pytest.mark.parametrize(
    "how",
    [
        "gc=gcfed",
        "algorithm=scaffold client.last_batch=wrap",
        "algorithm=feddyn client=adam client.last_batch=wrap",
        "algorithm=fedsam client.clip_norm=1",
        "algorithm=ditto",
        "algorithm=fedadamw",
        "algorithm=feddc gc=none client.accumulate=2",
    ],
)
def test_rows_that_train_on_change_no_client(twice, monkeypatch, how):
    """A stack of 32 clients trains an even number of rows, or a single one. It sends what other
    steps send. A kernel's last entries, which do not fill a vector, have other last bits.
    """

    changed = []
    grouped = BatchPlan.grouped

    def noted(plan):
        plan_of_groups = grouped(plan)
        changed.append(plan_of_groups.kinds != plan.kinds)
        return plan_of_groups

    monkeypatch.setattr(Twice, "alike", lambda self, a, b: torch.allclose(a, b, 0, 1e-14))
    monkeypatch.setattr(BatchPlan, "grouped", noted)
    same, played = twice(*how.split(), *MANY)
    assert same
    active = {kind.active for kind in played}
    assert all(n % 2 == 0 for n in active - {1})
    assert len(active) > 3
    assert any(changed)


class Draws(torch.nn.Sequential):
    """A user's network, which may draw random numbers."""

    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Dropout(0.3))


def test_rows_stay_as_they_are_where_networks_draw(twice):
    """More rows would change what they draw."""
    _, played = twice("gc=none", *MANY, model=f"{__name__}.Draws")
    assert any(kind.active % 2 for kind in played if kind.active > 1)


# ------------------------------------------------------------------------ recordings that later
# stacks replay
EVEN = ("client.last_batch=wrap", "client.steps=4", "participation.per_round=4")


@pytest.mark.parametrize(
    ("overrides", "once"),
    [
        (("algorithm=feddyn", "client.stack=2"), True),
        # The learning rate is a float32 tensor, and 2⁻⁴ is exact in float32.
        (("algorithm=scaffold", "client.lr_decay=0.5", "client.optimizer.lr=0.0625"), True),
        (("client=adam", "client.lr_decay=0.5", "client.optimizer.lr=0.0625"), True),
        # this optimizer needs a Python number
        (("client.lr_decay=0.5", "+client.optimizer.foreach=true"), False),
        (("gc=gcfed", "gc.local_rounds=1"), False),  # a recording depends on whether Local GC acts
        (("algorithm=moon",), False),  # a recording depends on whether a client has trained before
    ],
)
def test_later_stacks_replay_the_recordings_of_the_first(twice, monkeypatch, overrides, once):
    recordings = calls_of(monkeypatch, Tape, "record")
    questions = calls_of(monkeypatch, TrainingMemory, "_most_steps")
    same, played = twice(*EVEN, *overrides)
    stacks = 8 // (2 if "client.stack=2" in overrides else 1)
    assert same
    assert (len(recordings) == 1) == once
    if once:  # the first stack runs one step and records the next; all other steps are replayed
        assert len(played) == 4 * stacks - 2
        assert len(questions) == 1  # it reads the sizes of all clients


def test_a_full_table_drops_the_kind_that_was_not_used_for_longest(monkeypatch):
    monkeypatch.setattr(recorded_training, "MAX_RECORDINGS", 2)
    plan = BatchPlan(torch.zeros(1, 1, 4, dtype=torch.int64), None, np.array([[4]]))
    net = make_net()
    stack = SimpleNamespace(leaves=dict(net.named_parameters()), active=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tape = Listing()
    training = recorded_training.RecordedTraining(tape, 0, stack, plan, optimizer)
    kinds = [Kind(1, size, even=True) for size in (1, 2, 3)]
    one, two, three = kinds
    for kind in (one, one, two, two, one, three, three, one, two):
        training.run(lambda number, kind: None, 0, kind)
    # Two is gone when three comes; one was used in between.
    assert tape.played == [one, one]
    assert list(training._recordings) == [one, two]


class Inherits(Proximal):
    """A subclass of a method whose recordings all stacks can replay.

    Its own anchor has new memory in each stack.
    """

    def prepare(self, stack, own, download):
        self.anchor = {name: t * 0.5 for name, t in stack.broadcast_model.items()}

    def on_after_backward(self, trainer, pl_module):
        grads, weights, anchor = pl_module.clients.with_grads(pl_module.clients.full, self.anchor)
        torch._foreach_add_(grads, torch._foreach_sub(weights, anchor), alpha=self.mu)


class InheritsGC(LocalGC):
    """A subclass of Local GC, whose hooks may read other memory."""


def test_recordable_is_not_inherited(twice):
    assert Proximal.recordable == "run"
    assert Inherits.recordable == "stack"
    assert LocalGC().recordable == "run"
    assert LocalGC(rounds=1).recordable == "stack"
    assert InheritsGC().recordable == "stack"
    assert twice(*EVEN, method=f"{__name__}.Inherits")[0]


class Fades(Spy):
    """Weights the task's loss by 1, 1/2, … in the rounds."""

    recordable = "run"

    def on_download(self, download):
        self.task_weight = 1 / (download.round_index + 1)


def test_a_recording_is_not_replayed_with_another_task_weight(twice):
    """A recording holds the factor as a Python number."""
    same, played = twice(*EVEN, "gc=none", "rounds=3", method=f"{__name__}.Fades")
    assert same
    assert played


class Widens(Spy):
    """Prepares a number in float32 in the first round, and in float64 in the next one."""

    recordable = "run"

    def prepare(self, stack, own, download):
        dtype = torch.float64 if download.round_index else torch.float32
        return {"third": torch.tensor(1 / 3, dtype=dtype)}

    def on_after_backward(self, trainer, pl_module):
        stack = pl_module.clients
        for grad in stack.with_grads()[0]:
            grad.mul_(stack.prepared[self]["third"])


def test_what_methods_prepare_keeps_its_type(twice):
    same, played = twice(*EVEN, "gc=none", method=f"{__name__}.Widens")
    assert same
    assert played


# ------------------------------------------------------------------------------------- steps that
# are not recorded
class Counter(Spy):
    """Counts its steps in Python, so a recording would repeat one value."""

    recordable = "stack"

    def prepare(self, stack, own, download):
        self.steps = 0

    def on_after_backward(self, trainer, pl_module):
        self.steps += 1
        for grad in pl_module.clients.with_grads()[0]:
            grad.mul_(self.steps)


class Waiting(Spy):
    """Copies a norm to the host."""

    recordable = "stack"

    def on_after_backward(self, trainer, pl_module):
        for grad in pl_module.clients.with_grads()[0]:
            grad.div_(grad.norm().item())


class FromHost(Spy):
    """Copies a number to the device."""

    recordable = "stack"

    def on_after_backward(self, trainer, pl_module):
        for grad in pl_module.clients.with_grads()[0]:
            grad.mul_(torch.tensor(0.5))


class Silent(Counter):
    """Does not declare ``recordable``."""

    recordable = ""


class Listener(Callback):
    """A callback with a hook in local steps."""

    def on_after_backward(self, trainer, pl_module): ...


def test_a_counter_in_python_would_repeat_one_value(twice):
    assert not twice(method=f"{__name__}.Counter")[0]


@pytest.mark.parametrize(
    ("method", "message"),
    [("Waiting", "waits for the device: _local_scalar_dense"), ("FromHost", "from the host")],
)
def test_an_error_names_a_wait_or_a_number_from_the_host(twice, method, message):
    with pytest.raises(RuntimeError, match=message):
        twice(method=f"{__name__}.{method}")


@pytest.mark.parametrize("method", ["Silent", "Listener"])
def test_steps_are_recorded_only_if_all_listeners_allow_it(twice, method):
    same, played = twice(method=f"{__name__}.{method}")
    assert same
    assert not played
