"""Optimizers of users on the clients train as in plain PyTorch."""

from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from conftest import refuses
from harness import assert_near, make_net, sgd, train_rounds
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gcfed.federated.training.memory import TrainingMemory
from gcfed.federated.training.solver import LocalSolver
from gcfed.methods.server.fednova import FedNova
from gcfed.utils.checked import SettingError

RATE = 0.1
BOUND = 0.2  # of each weight


def clamp(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-BOUND, BOUND)


class Own(Optimizer):
    """SGD as people write it: ``.data`` is assigned."""

    def __init__(self, params, lr=RATE):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


class Clamped(SGD):
    """It counts its steps in Python."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        super().step()
        clamp(self)


def with_hook(kind):
    def make(params, lr=RATE):
        optimizer = kind(params, lr=lr)
        optimizer.register_step_post_hook(clamp)
        return optimizer

    return make


def with_other_step(params, lr=RATE):
    """As wrappers and schedulers replace it."""
    optimizer = SGD(params, lr=lr)
    plain = optimizer.step

    def step(self):
        plain()
        clamp(self)

    optimizer.step = MethodType(step, optimizer)
    return optimizer


def trained(optimizer, k=1):
    return train_rounds(solver=LocalSolver(optimizer, epochs=2, batch_size=4), rounds=2, k=k)


@pytest.fixture(scope="module")
def clamped():
    """The weights after training with an SGD that clamps the weights in its own ``step``."""
    weights = trained(partial(Clamped, lr=RATE))
    assert weights.abs().max() <= BOUND < trained(partial(SGD, lr=RATE)).abs().max()
    return weights


@pytest.mark.parametrize("k", [1, 3])
def test_an_optimizer_may_assign_data(k):
    assert_near(trained(Own, k), trained(partial(SGD, lr=RATE)), 1e-14)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "make", [with_hook(SGD), with_hook(Own), with_other_step], ids=["torch", "own", "replaced"]
)
def test_hooks_and_replaced_steps_of_an_optimizer_run(clamped, make, k):
    assert_near(trained(make, k), clamped, 1e-14)


def test_hooks_of_all_optimizers_run(clamped):
    hook = register_optimizer_step_post_hook(clamp)
    try:
        assert_near(trained(partial(SGD, lr=RATE)), clamped, 1e-14)
    finally:
        hook.remove()


def in_groups(*settings):
    """SGD with groups of parameters, each with settings of its own."""

    def make(params, lr=RATE):
        first, *rest = params
        groups = [{"params": [first]}, {"params": rest}]
        if len(settings) == 1:
            groups = [{"params": [first, *rest]}]
        groups = [group | own for group, own in zip(groups, settings, strict=True)]
        return SGD(groups, lr=lr)

    return make


@pytest.mark.parametrize("number", [1, 2])
def test_settings_of_all_groups_are_those_of_the_run(number):
    """Not the defaults of the optimizer: η_l, and the momentum by which FedNova counts steps."""
    setting = {"lr": 0.05, "momentum": 0.5}

    def with_fednova(optimizer):
        solver = LocalSolver(optimizer, epochs=2, batch_size=4)
        return train_rounds(solver=solver, rounds=2, methods=[FedNova()])

    expected = with_fednova(partial(SGD, **setting))
    assert_near(with_fednova(in_groups(*[setting] * number)), expected, 1e-14)


def test_a_method_that_reads_settings_needs_the_same_for_all_parameters():
    optimizer = in_groups({"momentum": 0.5}, {"momentum": 0.0})
    trained(optimizer)
    with refuses(r"FedNova needs a client\.optimizer with the same settings for all parameters"):
        train_rounds(
            solver=LocalSolver(optimizer, epochs=2, batch_size=4), rounds=1, methods=[FedNova()]
        )


def test_an_optimizer_without_a_learning_rate_is_refused():
    class NoRate(Own):
        def __init__(self, params):
            Optimizer.__init__(self, params, {})

        def step(self, closure=None): ...

    with pytest.raises(SettingError, match=r"^optimizer=NoRate has no lr"):
        LocalSolver(NoRate, epochs=1, batch_size=4)


class Recordable(Clamped):
    recordable = True


@pytest.mark.parametrize(
    ("make", "is_recorded"),
    [
        (partial(SGD, lr=RATE, momentum=0.9), True),
        (partial(torch.optim.AdamW, lr=RATE), True),
        (partial(torch.optim.RMSprop, lr=RATE), True),
        (Recordable, True),
        (partial(torch.optim.Adagrad, lr=RATE, lr_decay=0.1), False),  # reads its count in Python
        (Own, False),
        (Clamped, False),
        (with_hook(SGD), False),
        (with_other_step, False),
    ],
)
def test_only_steps_that_keep_no_number_in_python_are_recorded(monkeypatch, make, is_recorded):
    """A recorded step would repeat the number."""
    monkeypatch.setattr("gcfed.federated.training.memory.can_record", lambda *_: True)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr("gcfed.federated.training.memory.Recorder", object)
    module = SimpleNamespace(net=make_net(), device=torch.device("cuda"))
    solver = LocalSolver(make, epochs=1, batch_size=4)
    assert (TrainingMemory(module, None, solver).recorder() is not None) == is_recorded
    assert TrainingMemory(module, None, sgd(graphs=False)).recorder() is None
