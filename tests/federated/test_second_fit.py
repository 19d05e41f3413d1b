"""A loop of a trainer that was built by hand trains a second time."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import calls_of, refuses
from harness import PLAIN_SERVER, Cohorts, make_net, random_federation, sgd, trainer_of, weights
from lightning.pytorch import Callback

from gcfed.aggregators.mean import MeanAggregator
from gcfed.callbacks.after_round import SmoothedAccuracy
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.parts import ClientPart, ServerPart
from gcfed.federated.parts.method import parts_of
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.metrics.updates import Cohorts as MetricOfCohorts
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.run import train
from gcfed.utils.refusal import Refusal

ROUNDS = 2


class Zero(ServerPart):
    """Lets the server stand still."""

    def on_aggregate_end(self, update, round):
        for t in update.values():
            t.zero_()


def make_loop():
    return FederatedLoop(
        sampler=Cohorts(3),
        solver=sgd(),
        aggregator=MeanAggregator(),
        rounds=ROUNDS,
        seed=5,
    )


def fit(loop, module, data, methods=()):
    """The model after a fit, as one vector."""
    trainer = trainer_of([loop, *parts_of(methods)], ROUNDS)
    trainer.fit(module, datamodule=data)
    return weights(module.net)


def make_module():
    module = FederatedModule(make_net(), PLAIN_SERVER)
    module.test = lambda watchers: {}
    return module


@pytest.fixture
def data():
    data = random_federation()
    data.rounds = ROUNDS
    return data


def test_a_second_fit_calls_its_own_methods(data):
    loop = make_loop()
    module = make_module()
    once = fit(loop, module, data)
    assert torch.equal(fit(loop, module, data, [Zero()]), once)
    assert not torch.equal(fit(loop, module, data), once)


def test_a_second_fit_with_another_module_is_a_run_of_its_own(data):
    """Its clients have no states of the first run."""
    loop = make_loop()
    first = fit(loop, make_module(), data, [Scaffold()])
    assert torch.equal(fit(loop, make_module(), data, [Scaffold()]), first)


def test_a_second_run_does_not_smooth_over_the_tests_of_the_first(data):
    loop = make_loop()
    smoothed = SmoothedAccuracy()
    for accuracy in (0.5, 0.75):
        module = make_module()
        module.test = lambda watchers, accuracy=accuracy: {"test/acc": accuracy}
        fit(loop, module, data, [smoothed])
        assert loop.run.last_row["test/acc_smooth10"] == accuracy
        assert loop.run.last_row["test/acc_ema"] == accuracy


def test_a_second_run_with_the_same_method_begins_with_new_states_of_the_server(data):
    loop = make_loop()
    scaffold = Scaffold()
    first = fit(loop, make_module(), data, [scaffold])
    assert torch.equal(fit(loop, make_module(), data, [scaffold]), first)


def test_a_second_fit_has_the_settings_of_its_time(data):
    """Not those with which the first fit was bound."""
    loop = make_loop()
    module = make_module()
    begin = copy.deepcopy(module.net.state_dict())
    first = fit(loop, module, data)
    later = {"sampler": Cohorts(2), "solver": sgd(lr=0.3), "faults": Faults(dropout=0.4), "seed": 6}
    for name, value in later.items():
        module.net.load_state_dict(begin)
        setattr(loop, name, value)
        other = make_loop()
        for key in list(later)[: list(later).index(name) + 1]:
            setattr(other, key, later[key])
        second = fit(loop, module, data)
        assert torch.equal(second, fit(other, make_module(), data))
        assert not torch.equal(second, first)
        first = second


def test_a_fit_has_the_settings_of_its_time_though_the_run_was_bound_before(data):
    loop = make_loop()
    module = make_module()
    loop.bind([], data, module)
    loop.solver = sgd(lr=0.3)
    other = make_loop()
    other.solver = loop.solver
    assert torch.equal(fit(loop, module, data), fit(other, make_module(), data))


def test_a_second_fit_with_the_same_parts_is_a_run_of_its_own(data):
    """Its clients and its server have no states of the first run."""
    loop = make_loop()
    module = make_module()
    scaffold = Scaffold()
    begin = copy.deepcopy(module.net.state_dict())
    first = fit(loop, module, data, [scaffold])
    module.net.load_state_dict(begin)
    assert torch.equal(fit(loop, module, data, [scaffold]), first)


def test_a_trainer_that_has_finished_rounds_goes_on_with_its_run(data):
    loop = make_loop()
    module = make_module()
    scaffold = Scaffold()
    trainer = trainer_of([loop, *parts_of([scaffold])], 1)
    trainer.fit(module, datamodule=data)
    run = loop.run
    trainer.fit_loop.epoch_loop.max_steps = ROUNDS
    trainer.fit(module, datamodule=data)
    assert loop.run is run
    assert torch.equal(weights(module.net), fit(make_loop(), make_module(), data, [Scaffold()]))


def test_a_trainer_that_goes_on_with_more_rounds_keeps_its_clock_and_what_it_has_counted(data):
    whole = make_loop()
    whole.clock = Clock(step=1.0)
    fit(whole, make_module(), data)
    loop = make_loop()
    loop.clock = whole.clock
    loop.rounds = 1
    trainer = trainer_of([loop], 1)
    module = make_module()
    trainer.fit(module, datamodule=data)
    assert loop.run.counted
    counted = []
    trainer.callbacks.append(OnFitStart(lambda: counted.append(loop.run.counted)))
    loop.rounds = ROUNDS
    trainer.fit_loop.epoch_loop.max_steps = ROUNDS
    trainer.fit(module, datamodule=data)
    assert counted == [True]
    assert loop.run.settings.rounds == ROUNDS
    assert loop.run.last_row["clock/seconds"] == whole.run.last_row["clock/seconds"]


class OnFitStart(Callback):
    def __init__(self, look):
        self.look = look

    def on_fit_start(self, trainer, pl_module):
        self.look()


def test_a_table_of_a_second_run_has_no_lines_of_the_first(data, tmp_path):
    loop = make_loop()
    cohorts = MetricOfCohorts(str(tmp_path))
    tables = []
    for _ in range(2):
        fit(loop, make_module(), data, [cohorts])
        tables.append((tmp_path / "cohorts.csv").read_text())
    assert len(tables[0].splitlines()) > ROUNDS
    assert tables[1] == tables[0]


class Refused(ServerPart):
    def validate(self, setup):
        raise Refusal("it cannot work.")


def test_a_refused_fit_leaves_no_half_of_a_run(data):
    """The refusal has forgotten what clients kept, so the server must not keep its part."""
    loop = make_loop()
    module = make_module()
    begin = copy.deepcopy(module.net.state_dict())
    scaffold = Scaffold()
    first = fit(loop, module, data, [scaffold])
    with refuses("^it cannot work"):
        fit(loop, module, data, [scaffold, Refused()])
    module.net.load_state_dict(begin)
    assert torch.equal(fit(loop, module, data, [scaffold]), first)


class Breaks(ClientPart):
    def on_after_backward(self, trainer, pl_module):
        assert pl_module.clients is not None
        raise RuntimeError("the first step")


def test_an_error_in_local_training_leaves_no_stack_in_the_module(data):
    module = make_module()
    with pytest.raises(RuntimeError, match="the first step"):
        fit(make_loop(), module, data, [Breaks()])
    assert module.clients is None


def test_a_run_of_a_config_is_bound_once(config, tmp_path, monkeypatch):
    calls = calls_of(monkeypatch, FederatedLoop, "bind")
    train(config("rounds=1", "algorithm=scaffold", "metrics=drift", folder=tmp_path))
    assert calls == ["bind"]


def test_a_trainer_may_validate_before_its_first_fit(data):
    alone = fit(make_loop(), make_module(), data)
    loop = make_loop()
    module = make_module()
    trainer = trainer_of([loop], ROUNDS)
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    assert torch.equal(weights(module.net), alone)


@dataclass(frozen=True, kw_only=True)
class ListedCohorts(Cohorts):
    """A user's sampler that holds an array."""

    weights: np.ndarray


def test_a_sampler_that_holds_arrays_may_be_replaced(data):
    loop = make_loop()
    module = make_module()
    loop.sampler = ListedCohorts(3, weights=np.ones(3))
    loop.bind([loop], data, module)
    loop.sampler = ListedCohorts(3, weights=np.ones(3))
    vector = fit(loop, module, data)
    assert loop.run.settings.sampler is loop.sampler
    assert torch.equal(vector, fit(make_loop(), make_module(), data))
