"""The federated loop: the callback with which Lightning runs the rounds of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.federated.engine.bound_run import BoundRun, bind_run
from gcfed.federated.engine.settings import RunSettings
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.parts import ServerPart
from gcfed.federated.protocol.messages import nbytes
from gcfed.models.facts import is_recurrent
from gcfed.utils.refusal import Refusal


@dataclass(eq=False, kw_only=True)
class FederatedLoop(RunSettings, Callback):
    """Binds a run with these settings, and runs a round in each of Lightning's training steps
    (:func:`~gcfed.federated.engine.round.run_round`).

    The parts of methods are those callbacks of the trainer that are a :class:`Part`.
    """

    _run: BoundRun | None = field(default=None, init=False, repr=False)

    @staticmethod
    def of(trainer: Trainer) -> FederatedLoop:
        return next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))  # type: ignore[attr-defined]

    @property
    def run(self) -> BoundRun:
        """The run that :meth:`bind` has made last."""
        assert self._run is not None, "bind() comes first"
        return self._run

    def bind(self, callbacks: Sequence[Callback], data: Any, module: FederatedModule) -> None:
        """Binds a run with the present settings (:func:`~.bound_run.bind_run`).

        :func:`gcfed.assemble.assemble` calls it once, before there is a trainer. For a trainer that
        was built by hand, :meth:`setup` calls it.

        Raises Refusal if a combination cannot work; names the config key and the reason.
        """
        self._run = bind_run(self.settings(), callbacks, data, module)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Binds a new run, before Lightning loads a checkpoint: each fit that begins at the first
        round is a run of its own. Its server and clients have kept nothing yet.

        A run that is bound and has not begun is not bound a second time. A trainer that has
        finished rounds goes on with its run, also if settings have changed, such as ``rounds``.
        """
        assert isinstance(pl_module, FederatedModule)
        if stage != "fit":
            return
        callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        data = trainer.datamodule  # type: ignore[attr-defined]
        before = self._run
        if before is not None:
            if before.has_begun and trainer.global_step == 0:
                self._forget_states(callbacks)
            elif before.is_of(self.settings(), callbacks, data, pl_module):
                return
        self.bind(callbacks, data, pl_module)
        if before is not None and trainer.global_step > 0:
            self.run.continue_from(before)

    def _forget_states(self, callbacks: Sequence[Callback]) -> None:
        """Forgets what clients and the server have kept in the run before."""
        self.run.setup.stores.forget_all()
        for part in callbacks:
            if isinstance(part, ServerPart):
                part.forget_states()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, FederatedModule)
        run = self.run
        schedule = run.server.schedule
        if schedule.download_bytes == 0:  # there was no round
            size = nbytes(pl_module.travelling_state())
            schedule.expect_bytes(size, size)
        why = pl_module.traits.why_not_functional
        if why and pl_module.device.type == "cuda" and is_recurrent(pl_module.net):
            raise Refusal(
                f"model: a recurrent network that has {why} cannot train on a GPU: set trainer=cpu."
            )
        run.has_begun = True
        run.setup.transport.start()
        run.setup.stores.start(trainer)
        trainer.strategy.barrier()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._run is not None:  # a validation may come before the first fit
            self._run.setup.stores.release()
            self._run.simulation.program.memory.clear()

    def state_dict(self) -> dict[str, Any]:
        return self.run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.run.load_state_dict(state_dict)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the round's row of metrics, ``outputs``. Tells Lightning's callbacks of a test."""
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
        may_come_later = any(getattr(part, "every", 1) > 1 for part in self.run.server.parts)
        if monitor is None or monitor in row or may_come_later:
            return
        raise Refusal(f"monitor={monitor} is no column of this run. There are {', '.join(row)}.")

    def _log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=row["round"])
        for name, value in row.items():
            trainer.callback_metrics[name] = torch.tensor(float(value), dtype=torch.float64)
