"""The federated loop: where a round happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gcfed.data.sampling import ClientSampler
from gcfed.federated.aggregate import Aggregator
from gcfed.federated.client import ClientProgram
from gcfed.federated.faults import Faults
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, MessageError, Upload, finite_clients, nbytes, refuse_other
from gcfed.federated.method import ClientPart, Order, Part, ServerPart, Setup, upload_shapes
from gcfed.federated.module import FederatedModule
from gcfed.federated.probe import look
from gcfed.federated.refusals import validate_parts
from gcfed.federated.round import Round, Shapes, Tally, Totals, Transport
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stack import is_recurrent
from gcfed.federated.stacks import Stacks
from gcfed.federated.store import ClientStores
from gcfed.utils.checked import SettingError

log = logging.getLogger(__name__)


class FederatedLoop(Callback):
    """The server's program: drives a round before each training step of Lightning; knows no algorithm by name.

    The parts of methods are the trainer's callbacks that are :class:`Part`, in their order there.

    Args:
        rounds: R, the number of communication rounds.
        seed: the run's seed; every draw derives from it.
        eval_every: rounds between two tests of the global model; the last round is always tested.
        stores: where states by client lie; by default in a temporary folder, without checkpoints.
        federation: makes another transport than the simulation in memory, of that one and of what tells what a client
            sends.
    """

    def __init__(
        self,
        *,
        sampler: ClientSampler,
        solver: LocalSolver,
        aggregator: Aggregator,
        rounds: int,
        seed: int,
        eval_every: int = 1,
        stores: ClientStores | None = None,
        faults: Faults | None = None,
        federation: Callable[[Stacks, Shapes], Transport] | None = None,
    ) -> None:
        self.sampler, self.solver, self.aggregator = sampler, solver, aggregator
        self.rounds, self.seed, self.eval_every = rounds, seed, eval_every
        self.stores, self.faults = stores or ClientStores(), faults or Faults()
        self.federation = federation
        self.data: Any = None
        self.row: dict[str, Any] = {}
        self.last_row: dict[str, Any] = {}
        self.round: Round | None = None

    @staticmethod
    def of(trainer: Trainer) -> FederatedLoop:
        return next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, FederatedModule)
        if self.data is not trainer.datamodule:  # type: ignore[attr-defined]
            self.bind(trainer.callbacks, trainer.datamodule, pl_module)  # type: ignore[attr-defined]
        self.stacks.__dict__.pop("layout", None)  # the device is known only now
        if pl_module.device.type == "cuda" and is_recurrent(pl_module.net) and (why := pl_module.traits.functional):
            raise ValueError(f"model: on a GPU no recurrent network can train that has {why}: set trainer=cpu.")
        if trainer.world_size > 1:
            self.stores.require_common_disk(trainer.strategy)
        self.transport.start()
        pl_module.test_elsewhere = self.transport.test
        self.stores.start(trainer.world_size, first=trainer.is_global_zero)
        trainer.strategy.barrier()

    def bind(self, callbacks: Sequence[Callback], data: Any, module: FederatedModule) -> None:
        """Brings the parts of a run together, once, and lets each refuse what it cannot work with.

        Raises:
            ValueError: a combination that cannot work; names the config key and the reason.
        """
        self.server_parts = [part for part in callbacks if isinstance(part, ServerPart)]
        clients = [part for part in callbacks if isinstance(part, ClientPart)]
        program = ClientProgram(module, data, self.solver, clients, self.faults, self.aggregator)
        self.stacks = Stacks(program, self.stores, self.sampler.per_round)
        self.transport: Transport = self.stacks
        if self.federation is not None:
            try:
                self.transport = self.federation(self.stacks, self._shapes)
            except SettingError as error:
                raise ValueError(f"federation.{error.name}{error.rest}") from None
        self.sampler.validate(data.num_clients)
        parts = [part for part in callbacks if isinstance(part, Part)]
        cohort = self.sampler.per_round - (self.faults.extra or 0)
        setup = Setup(
            self.sampler, self.solver, self.aggregator, self.stores, data, module, parts, self.rounds, cohort,
            self.transport,
        )  # fmt: skip
        self.aggregator.validate(setup)
        self.solver.validate(module.net, data)
        look(module, data)
        self.solver.check_stack(module.traits.alone)
        validate_parts(setup)
        self.data = data

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stores.release()
        self.solver.forget()

    def state_dict(self) -> dict[str, Any]:
        return {"stores": self.stores.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stores.load_state_dict(state_dict["stores"])

    # ------------------------------------------------------------------------------------------------ one round
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Lets the cohort train and leaves the pseudo-gradient −Δ in the global network."""
        assert isinstance(pl_module, FederatedModule)
        self._started = time.perf_counter()
        before = pl_module.broadcast_state()
        round = self.round = self._draw(trainer, before)
        download = self._send(round)
        update, totals = self._take(download, round, pl_module.device)
        usable = round.num_finite > 0 and not totals.overflown
        if usable:
            for part in self.server_parts:
                part.on_aggregate_end(update, round)
        pl_module.set_update(update if usable else None, before)
        self._answer(download, round)
        if (unusable := len(round.cohort) - round.num_finite) and trainer.is_global_zero:
            log.warning(
                "round %d: %d of %d clients sent numbers that are not finite; %s. Lower client.optimizer.lr or set "
                "client.clip_norm.", round.index + 1, unusable, len(round.cohort),
                "they are left out" if round.num_finite else "the model stays as it was",
            )  # fmt: skip
        self.row = self._count(download, round, totals)

    def _draw(self, trainer: Trainer, model: Params) -> Round:
        """The cohort of a round, less who will not come back."""
        t, num_clients = trainer.global_step, self.data.num_clients
        drawn = self.sampler(t, num_clients, self.seed)
        cohort = self.faults.survivors(drawn, self._steps(drawn, t), t, self.seed)
        return Round(
            t, self.seed, cohort, num_clients, dict(model), self.solver.lr(t), server=trainer.optimizers[0],
            lost=len(drawn) - len(cohort),
        )  # fmt: skip

    def _steps(self, clients: np.ndarray, index: int) -> np.ndarray:
        """Local steps that these clients do in a round, ``[K]``."""
        return self.faults.steps(self.transport.planned(clients), clients, index, self.seed)

    def _send(self, round: Round) -> Download:
        """What goes to every client."""
        download = Download(round.index, round.seed, round.lr, round.start, round.cohort)
        for part in self.server_parts:
            part.on_broadcast(download, round)
        return download

    def _shapes(self) -> tuple[dict[str, Params], dict[str, Params]]:
        """What a client sends in this round, and what it notes."""
        assert self.round is not None
        notes = {name: like for part in self.server_parts for name, like in part.notes(self.round).items()}
        return upload_shapes(self.server_parts, self.round), notes

    def _take(self, download: Download, round: Round, device: torch.device) -> tuple[Params, Totals]:
        """Takes in the uploads as they come and reduces them to one update."""
        tally, (shapes, _) = Tally(device), self._shapes()
        floats = [name for name, like in shapes.items() if all(t.is_floating_point() for t in like.values())]
        extra = {name: self.aggregator.beside() for name in floats if name != "delta"}
        looks_first = sorted(self.server_parts, key=lambda part: part.order is not Order.MEASURES)
        for upload in self.transport.fit(download, round.cohort):
            self._refuse_misfit(upload, shapes, round)
            for part in looks_first:
                part.on_receive(upload, round)
            for name, aggregator in extra.items():
                aggregator.add(replace(upload, delta=upload.extra[name]), round)
            self.aggregator.add(upload, round)
            tally.add(upload)
            del upload  # nothing holds it while the next stack trains
        round.lose(self.transport.missing)
        update = self.aggregator.reduce(round, shapes["delta"])
        round.received = {name: part.reduce(round, shapes[name]) for name, part in extra.items()}
        results = [{name: t.unsqueeze(0) for name, t in part.items()} for part in (update, *round.received.values())]
        totals = tally.totals(~torch.cat([finite_clients(part) for part in results]).all(0, keepdim=True), round.reduce)
        self.stores.finish_round(round.cohort, round.index)  # only now has every process sent, so written, what it has
        round.num_finite = int(totals.finite)
        return update, totals

    def _refuse_misfit(self, upload: Upload, shapes: Mapping[str, Params], round: Round) -> None:
        """Raises ValueError, naming method and key, where a client part sends other than its server part reads."""
        for name in {**shapes, **upload.extra}:
            sent = upload.delta if name == "delta" else upload.extra.get(name, {})
            try:
                refuse_other(f"an upload's {name}", sent, shapes.get(name, {}), len(upload.clients))
            except MessageError as error:
                lists = [part.title for part in self.server_parts if name in part.uploads(round)]
                sends = [part.title for part in self.stacks.program.parts if part.overrides("on_upload")]
                who = " or ".join(dict.fromkeys(lists or sends))
                raise ValueError(f"{who}: on_upload does not send what uploads() lists: {error}") from None

    def _answer(self, download: Download, round: Round) -> None:
        """Tells the cohort what it must know of the round, if anything."""
        if round.reply:
            self.transport.reply(round.reply, download)
            # No process may read a state in the next round before its last process has written it.
            (told,) = round.reduce([torch.ones(1, device=next(iter(round.start.values())).device)])
            told.item()

    def _count(self, download: Download, round: Round, totals: Totals) -> dict[str, Any]:
        """The round's row of metrics, as far as it is known."""
        cohort = len(round.cohort)
        sent = cohort + round.lost - self.transport.unasked
        down_bytes = sent * download.nbytes + cohort * sum(map(nbytes, round.reply.values()))
        loss = totals.loss / totals.losses if totals.losses else float("nan")
        row = {
            "round": round.index + 1,
            **({"train/loss": loss} if cohort else {}),
            "train/clients": cohort,
            "train/nonfinite_clients": cohort - round.num_finite,
            "train/refused_steps": int(totals.overflown > 0),
            "train/samples": int(totals.samples),
            "train/steps": int(totals.steps),
            "comm/down_bytes": down_bytes,
            "comm/up_bytes": int(totals.up_bytes),
            "time/train_s": time.perf_counter() - self._started,
        }
        faulty = self.faults != Faults()
        if faulty or self.transport.remote:
            row["train/dropped_clients"] = round.lost
        if faulty:
            fewer = self._steps(round.cohort, round.index) < self.transport.planned(round.cohort)
            row["train/stragglers"] = int(fewer.sum())
        return row

    # ------------------------------------------------------------------------------------- the end of a round
    def tested(self, round_number: int) -> bool:
        """Whether the global model is tested after the round with this number (the first is 1)."""
        return round_number % self.eval_every == 0 or round_number >= self.rounds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, FederatedModule)
        assert self.round is not None
        self.row["train/refused_steps"] += pl_module.refused
        if self.row["train/refused_steps"] and trainer.is_global_zero:
            log.warning("round %d: the server's step was not finite; the model stays as it was.", self.round.index + 1)
        if trainer.global_step >= self.rounds:
            trainer.should_stop = True  # makes Lightning test after the last round, whatever eval_every is
        if not self.tested(trainer.global_step):
            self._finish_round(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self.row:
            assert isinstance(pl_module, FederatedModule)
            self.row |= {key: float(trainer.callback_metrics[key]) for key in pl_module.tested()}
            self._finish_round(trainer)

    def _finish_round(self, trainer: Trainer) -> None:
        """Logs the round's row, once and whole."""
        assert self.round is not None
        for part in self.server_parts:
            part.on_round_end(self.row, self.round)
        self.row["time/round_s"] = time.perf_counter() - self._started
        row, self.row = self.row, {}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=row["round"])
        self.last_row = row
