"""The federated loop: connects the parts of a run, and runs its rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.federated.engine.client import ClientProgram
from gcfed.federated.engine.round import run_round
from gcfed.federated.engine.round_row import columns_of_run
from gcfed.federated.engine.server import Server
from gcfed.federated.engine.simulation import Simulation
from gcfed.federated.network.blame import blamed
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.probing.probe import set_traits
from gcfed.federated.parts import ClientPart, Part, ServerPart, Setup, Transport
from gcfed.federated.parts.part import Aggregator
from gcfed.federated.parts.refusals import check_aggregator, validate_parts
from gcfed.federated.protocol.messages import nbytes
from gcfed.federated.protocol.rounds import Received
from gcfed.federated.state.store import ClientStores
from gcfed.federated.state.versioned_files import SENT
from gcfed.federated.training.solver import LocalSolver
from gcfed.models.facts import is_recurrent
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.schedule import Participation, Schedule
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class FederatedLoop(Callback):
    """Runs a round in each of Lightning's training steps
    (:func:`~gcfed.federated.engine.round.run_round`).

    The parts of methods are those callbacks of the trainer that are a :class:`Part`.
    """

    sampler: Participation
    solver: LocalSolver
    aggregator: Aggregator
    rounds: int  # R, the number of communication rounds
    seed: int  # every draw derives from it
    # rounds between two tests of the global model; the last round is always tested
    eval_every: int = 1
    # the default has a temporary folder and no checkpoints
    stores: ClientStores = field(default_factory=ClientStores)
    faults: Faults = field(default_factory=Faults)
    clock: Clock = field(default_factory=Clock)
    # partial of a transport's class, which takes the simulation in memory; None: the simulation
    federation: partial[Transport] | None = None
    data: Any = field(default=None, init=False)  # None before ``bind``
    # set by ``bind``
    schedule: Schedule = field(init=False, repr=False)
    simulation: Simulation = field(init=False, repr=False)
    # without a federation, ``simulation`` itself
    transport: Transport = field(init=False, repr=False)
    server: Server = field(init=False, repr=False)
    # whether a client has counted in a round of this run
    counted: bool = field(default=False, init=False)
    # the row of metrics of the last round that this process ran; {} before
    last_row: dict[str, Any] = field(default_factory=dict, init=False)

    @staticmethod
    def of(trainer: Trainer) -> FederatedLoop:
        return next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))  # type: ignore[attr-defined]

    @property
    def columns(self) -> list[str]:
        """The columns of its rows, without columns of the test and of methods."""
        return columns_of_run(self.sampler, self.faults, self.clock, remote=self.is_remote)

    @property
    def is_remote(self) -> bool:
        """Whether clients run on other machines. It is known before ``bind``, because a table asks
        for the columns of runs that it does not build.
        """
        if self.federation is None:
            return False
        transport: Any = self.federation.func  # a class
        return bool(transport.remote)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Binds the run of a trainer that was built by hand, before Lightning loads a checkpoint.

        :func:`gcfed.assemble.assemble` has already bound all other runs. A later ``fit`` with other
        data, another module or other parts is another run. Its server and clients have kept nothing
        yet.
        """
        assert isinstance(pl_module, FederatedModule)
        callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        data = trainer.datamodule  # type: ignore[attr-defined]
        if stage != "fit" or self._is_bound_to(callbacks, data, pl_module):
            return
        if self.data is not None:
            self._forget_run(callbacks)
        self.bind(callbacks, data, pl_module)

    def _is_bound_to(
        self, callbacks: Sequence[Callback], data: Any, module: FederatedModule
    ) -> bool:
        if self.data is None:
            return False
        parts = [callback for callback in callbacks if isinstance(callback, Part)]
        setup = self.server.setup
        # A later ``bind`` that was refused has made another transport.
        is_last_bind = setup.transport is self.transport
        return (
            is_last_bind and setup.data is data and setup.module is module and setup.parts == parts
        )

    def _forget_run(self, callbacks: Sequence[Callback]) -> None:
        """Forgets what clients and the server have kept in the run before."""
        self.stores.forget_all()
        self.counted = False
        self.last_row = {}
        for part in callbacks:
            if isinstance(part, ServerPart):
                part.forget_states()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, FederatedModule)
        if self.schedule.download_bytes == 0:  # there was no round
            size = nbytes(pl_module.travelling_state())
            self.schedule.expect_bytes(size, size)
        why = pl_module.traits.why_not_functional
        if why and pl_module.device.type == "cuda" and is_recurrent(pl_module.net):
            raise Refusal(
                f"model: a recurrent network that has {why} cannot train on a GPU: set trainer=cpu."
            )
        self.transport.start()
        self.stores.start(trainer)
        trainer.strategy.barrier()

    def bind(self, callbacks: Sequence[Callback], data: Any, module: FederatedModule) -> None:
        """Connects the parts of a run to the loop, and the loop to the module. Each part checks
        what it needs.

        :func:`gcfed.assemble.assemble` calls it once, before there is a trainer. For a trainer that
        was built by hand, :meth:`setup` calls it.

        Raises Refusal if a combination cannot work; names the config key and the reason.
        """
        check_aggregator(self.aggregator)
        clients = [part for part in callbacks if isinstance(part, ClientPart)]
        program = ClientProgram(
            module, data, self.solver, clients, self.faults, self.aggregator.limit
        )
        cohort_size = self.faults.used(self.sampler.per_round)
        self.simulation = Simulation(program, self.stores, cohort_size)
        self.transport = self.federation(self.simulation) if self.federation else self.simulation
        self.stores = self.transport.stores
        self.sampler.validate(data.num_clients)
        parts = [part for part in callbacks if isinstance(part, Part)]
        self.schedule = self._make_schedule(data)
        setup = Setup(
            sampler=self.sampler,
            faults=self.faults,
            solver=self.solver,
            aggregator=self.aggregator,
            stores=self.stores,
            data=data,
            module=module,
            parts=parts,
            rounds=self.rounds,
            transport=self.transport,
        )
        self.aggregator.validate(setup)
        with blamed(module.net, module.task, "before the first round"):
            set_traits(module, data, self.solver.stack)
            self._check_traits(module, data)
            validate_parts(setup)
        self.data = data
        self.server = Server(setup, self.schedule, self.seed, self.columns)
        module.loop = self

    def _check_traits(self, module: FederatedModule, data: Any) -> None:
        traits = module.traits
        self.solver.check(traits, data)
        if self.solver.accumulate > 1 and traits.mixes_samples:
            log.warning(
                "client.accumulate changes the results: the network or the loss mixes the samples"
                " of a batch, and now it sees only a part of them"
            )

    def _make_schedule(self, data: Any) -> Schedule:
        """The run's timetable. Raises Refusal if a setting of it cannot work."""
        schedule = self.sampler.schedule(
            self.faults,
            self.clock,
            data.num_clients,
            self.seed,
            self.transport.planned,
            data.sizes,
        )
        schedule.validate()
        if schedule.timed and self.transport.remote:
            raise Refusal(
                "participation.clock.step: real sites take the time that they take. Leave it out."
            )
        if schedule.late:
            self.stores.names.add(SENT)
        return schedule

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stores.release()
        self.simulation.program.memory.clear()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"stores": self.stores.state_dict(), "counted": self.counted}
        timetable = self.schedule.state_dict()
        if timetable:
            state["schedule"] = timetable
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stores.load_state_dict(state_dict["stores"])
        self.counted = state_dict["counted"]
        if "schedule" in state_dict:
            self.schedule.load_state_dict(state_dict["schedule"])

    def run_and_test(self, round_index: int) -> dict[str, Any]:
        """Runs the round with this index and its test. Returns the row of metrics."""
        started = time.perf_counter()
        row, received = run_round(round_index, self.server)
        self.counted = self.counted or received.num_finite > 0
        module = self.server.setup.module
        if self._is_tested(round_index):
            row |= module.test([part.on_test_batch for part in self.server.parts])
        else:
            self._require_another_round(round_index, module.trainer)
        self._add_columns(row, received)
        row = numbers(row)
        row["time/round_s"] = time.perf_counter() - started
        self.server.explanations.warn_of_row(row)
        return row

    def _is_tested(self, round_index: int) -> bool:
        finished = round_index + 1
        is_last = finished >= self.rounds or self.server.setup.module.trainer.should_stop
        return is_last or finished % self.eval_every == 0

    @staticmethod
    def _require_another_round(round_index: int, trainer: Trainer) -> None:
        """Makes Lightning train the round after this one, which has no test.

        If a callback such as Lightning's Timer ends the run now, the next round is the last and has
        a test. A metric with ``every`` above 1 may still have no measurement there.
        """
        epoch_loop = trainer.fit_loop.epoch_loop
        epoch_loop.min_steps = max(epoch_loop.min_steps or 0, round_index + 2)

    def _add_columns(self, row: dict[str, Any], received: Received) -> None:
        """Lets the parts add columns to the row."""
        for part in self.server.parts:
            before = dict(row)
            part.on_round_end(row, received)
            refuse_changes(part, before, row)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the round's row of metrics, ``outputs``. Tells Lightning's callbacks of a test."""
        self.last_row = dict(outputs)
        self._log(trainer, outputs)
        if "test/loss" not in outputs:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping | ModelCheckpoint):
                self._refuse_unknown_column(callback.monitor, outputs)
                if callback.monitor is None or callback.monitor in outputs:
                    callback.on_validation_end(trainer, pl_module)

    def _refuse_unknown_column(self, monitor: str | None, row: dict[str, Any]) -> None:
        """Raises Refusal if neither this row of a test nor a later one has the column."""
        may_come_later = any(getattr(part, "every", 1) > 1 for part in self.server.parts)
        if monitor is None or monitor in row or may_come_later:
            return
        raise Refusal(f"monitor={monitor} is no column of this run. There are {', '.join(row)}.")

    def _log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=row["round"])
        for name, value in row.items():
            trainer.callback_metrics[name] = torch.tensor(float(value), dtype=torch.float64)


def refuse_changes(part: ServerPart, before: dict[str, Any], row: dict[str, Any]) -> None:
    """Raises Refusal if a part has removed a column of the row, or given it a second value."""
    for name, value in before.items():
        if name not in row:
            raise Refusal(f"{part.title} removes the column {name}, which is not its own.")
        # Measurements subtract their time from that of training.
        if row[name] is not value and name != "time/train_s":
            raise Refusal(
                f"{part.title} writes the column {name}, which the row already has. Rename it."
            )


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The row with tensors as numbers. Raises Refusal for anything else."""
    plain = {}
    for name, value in row.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, Real):
            raise Refusal(
                f"column {name}: a row of metrics takes numbers, and a part has given it {value!r}."
            )
        plain[name] = value
    return plain
