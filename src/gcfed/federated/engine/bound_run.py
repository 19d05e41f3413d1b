"""A run of the federated loop: its settings, connected to data, a network and methods."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, Trainer

from gcfed.federated.engine.client import ClientProgram
from gcfed.federated.engine.round import run_round
from gcfed.federated.engine.round_row import numbers, refuse_changes
from gcfed.federated.engine.server import Server
from gcfed.federated.engine.settings import RunSettings
from gcfed.federated.engine.simulation import Simulation
from gcfed.federated.network.blame import blamed
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.probing.probe import set_traits
from gcfed.federated.parts import ClientPart, Part, Setup
from gcfed.federated.parts.refusals import check_aggregator, validate_parts
from gcfed.federated.parts.transport import Transport
from gcfed.federated.protocol.rounds import Received
from gcfed.federated.state.versioned_files import SENT
from gcfed.participation.schedule import Schedule
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class BoundRun:
    """Runs the rounds of one run, and their tests.

    Attributes:
        settings: as they were when the run was bound.
        simulation: the clients in this process; without a federation, the transport.
        has_begun: whether a fit has begun its rounds.
        counted: whether a client has counted in a round.
        last_row: the row of metrics of the last round that this process ran; {} before.
    """

    settings: RunSettings
    simulation: Simulation
    server: Server
    has_begun: bool = field(default=False, init=False)
    counted: bool = field(default=False, init=False)
    last_row: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def setup(self) -> Setup:
        """The parts of the run."""
        return self.server.setup

    def is_of(
        self,
        settings: RunSettings,
        callbacks: Sequence[Callback],
        data: Any,
        module: FederatedModule,
    ) -> bool:
        """Whether it was bound with these settings, callbacks, data and module."""
        return (
            same_settings(self.settings, settings)
            and self.setup.parts == parts_among(callbacks)
            and self.setup.data is data
            and self.setup.module is module
        )

    # ------------------------------------------------------------------------------------- rounds
    def run_and_test(self, round_index: int) -> dict[str, Any]:
        """Runs the round with this index and its test. Returns the row of metrics."""
        started = time.perf_counter()
        row, received = run_round(round_index, self.server, self.settings.columns)
        self.counted = self.counted or received.num_finite > 0
        module = self.setup.module
        if self._is_tested(round_index):
            row |= module.test([part.on_test_batch for part in self.server.parts])
        else:
            _require_another_round(round_index, module.trainer)
        self._add_columns(row, received)
        row = numbers(row)
        row["time/round_s"] = time.perf_counter() - started
        self.server.explanations.warn_of_row(row)
        self.last_row = dict(row)
        return row

    def _is_tested(self, round_index: int) -> bool:
        finished = round_index + 1
        should_stop = self.setup.module.trainer.should_stop
        is_last = finished >= self.settings.rounds or should_stop
        return is_last or finished % self.settings.eval_every == 0

    def _add_columns(self, row: dict[str, Any], received: Received) -> None:
        """Lets the parts add columns to the row."""
        for part in self.server.parts:
            before = dict(row)
            part.on_round_end(row, received)
            refuse_changes(part, before, row)

    def continue_from(self, before: BoundRun) -> None:
        """Goes on with the rounds of a run that was bound with other settings."""
        self.counted = before.counted
        self.last_row = before.last_row
        if type(self.server.schedule) is type(before.server.schedule):
            timetable = before.server.schedule.state_dict()
            if timetable:
                self.server.schedule.load_state_dict(timetable)

    # -------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        state = {"stores": self.setup.stores.state_dict(), "counted": self.counted}
        timetable = self.server.schedule.state_dict()
        if timetable:
            state["schedule"] = timetable
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.setup.stores.load_state_dict(state_dict["stores"])
        self.counted = state_dict["counted"]
        if "schedule" in state_dict:
            self.server.schedule.load_state_dict(state_dict["schedule"])


def parts_among(callbacks: Sequence[Callback]) -> list[Part]:
    """The parts of methods and metrics, in the order of their hooks."""
    return [callback for callback in callbacks if isinstance(callback, Part)]


def same_settings(before: RunSettings, now: RunSettings) -> bool:
    """Whether all numbers are equal and all objects are the same.

    Objects are not compared by their contents: a user's sampler may hold arrays.
    """
    for name, value in vars(now).items():
        old = vars(before)[name]
        if old is not value and not (isinstance(value, int | float | str) and old == value):
            return False
    return True


def bind_run(
    settings: RunSettings, callbacks: Sequence[Callback], data: Any, module: FederatedModule
) -> BoundRun:
    """Connects the parts among these callbacks, the data and the module. Each part checks what it
    needs.

    Raises Refusal if a combination cannot work; names the config key and the reason.
    """
    check_aggregator(settings.aggregator)
    clients = [part for part in callbacks if isinstance(part, ClientPart)]
    program = ClientProgram(
        module, data, settings.solver, clients, settings.faults, settings.aggregator.limit
    )
    cohort_size = settings.faults.used(settings.sampler.per_round)
    simulation = Simulation(program, settings.stores, cohort_size)
    transport: Transport = simulation
    if settings.federation is not None:
        transport = settings.federation(simulation)
    settings.sampler.validate(data.num_clients)
    schedule = _make_schedule(settings, transport, data)
    setup = Setup(
        sampler=settings.sampler,
        faults=settings.faults,
        solver=settings.solver,
        aggregator=settings.aggregator,
        stores=transport.stores,
        data=data,
        module=module,
        parts=parts_among(callbacks),
        rounds=settings.rounds,
        transport=transport,
    )
    with blamed(module.net, module.task, "before the first round"):
        set_traits(module, data, settings.solver.stack)
        _check_traits(setup)
        validate_parts(setup)
        setup.aggregator.bind(setup)
        for part in setup.parts:
            part.join_run(setup)
    run = BoundRun(
        settings=settings,
        simulation=simulation,
        server=Server(setup, schedule, settings.seed),
    )
    module.run = run
    return run


def _make_schedule(settings: RunSettings, transport: Transport, data: Any) -> Schedule:
    """The run's timetable. Raises Refusal if a setting of it cannot work."""
    schedule = settings.sampler.schedule(
        settings.faults,
        settings.clock,
        data.num_clients,
        settings.seed,
        transport.planned,
        data.sizes,
    )
    schedule.validate()
    if schedule.timed and transport.remote:
        raise Refusal(
            "participation.clock.step: real sites take the time that they take. Leave it out."
        )
    if schedule.late:
        transport.stores.names.add(SENT)
    return schedule


def _check_traits(setup: Setup) -> None:
    traits = setup.module.traits
    setup.solver.check(traits, setup.data)
    if setup.solver.accumulate > 1 and traits.mixes_samples:
        log.warning(
            "client.accumulate changes the results: the network or the loss mixes the samples"
            " of a batch, and now it sees only a part of them"
        )


def _require_another_round(round_index: int, trainer: Trainer) -> None:
    """Makes Lightning train the round after this one, which has no test.

    If a callback such as Lightning's Timer ends the run now, the next round is the last and has
    a test. A metric with ``every`` above 1 may still have no measurement there.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.min_steps = max(epoch_loop.min_steps or 0, round_index + 2)
