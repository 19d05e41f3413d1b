"""The federated loop: where a round happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gcfed.data.sampling import ClientSampler
from gcfed.federated.aggregate import Aggregator, Upload, finite_clients
from gcfed.federated.faults import Faults
from gcfed.federated.method import FederatedMethod, Setup, upload_shapes, validate_methods
from gcfed.federated.module import FederatedModule
from gcfed.federated.processes.strategy import sum_over_processes
from gcfed.federated.recorder import Recorder
from gcfed.federated.round import Round, assign
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stack import ClientStack, broadcast_state, nbytes
from gcfed.federated.store import ClientStores
from gcfed.federated.streams import Streams, layout
from gcfed.utils.device import on_device
from gcfed.utils.rng import torch_seed

log = logging.getLogger(__name__)


class FederatedLoop(Callback):
    """Drives a round before each training step of Lightning; knows no algorithm by name.

    The methods are the trainer's callbacks that are :class:`FederatedMethod`, in their order there.

    Args:
        sampler: draws the cohort of a round.
        solver: local training.
        aggregator: reduces the uploads to one update.
        rounds: R, the number of communication rounds.
        seed: the run's seed; every draw derives from it.
        eval_every: rounds between two tests of the global model; the last round is always tested.
        stores: where methods keep their clients' state; by default in a temporary folder, without checkpoints.
        faults: which clients drop out or do less than was asked of them; by default none.
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
    ) -> None:
        self.sampler, self.solver, self.aggregator = sampler, solver, aggregator
        self.rounds, self.seed, self.eval_every = rounds, seed, eval_every
        self.stores, self.faults = stores or ClientStores(), faults or Faults()
        self.methods: list[FederatedMethod] = []
        self.data: Any = None
        self.row: dict[str, Any] = {}
        self.last_row: dict[str, Any] = {}
        self.round: Round | None = None
        self._started = 0.0
        self._layout: tuple[int, Streams] | None = None

    @staticmethod
    def of(trainer: Trainer) -> FederatedLoop:
        """The loop of a trainer."""
        return next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, FederatedModule)
        if self.data is not trainer.datamodule:  # type: ignore[attr-defined]
            self.bind(trainer.callbacks, trainer.datamodule, pl_module)  # type: ignore[attr-defined]
        self._layout = None
        self.stores.start(trainer.world_size, first=trainer.is_global_zero)
        trainer.strategy.barrier()

    def bind(self, callbacks: Sequence[Callback], data: Any, module: FederatedModule) -> None:
        """Brings the parts of a run together, once, and lets each refuse what it cannot work with.

        Args:
            callbacks: those of the trainer, in its order; its methods are among them.
            data: the clients' samples.
            module: the global model.

        Raises:
            ValueError: a combination that cannot work; names the config key and the reason.
        """
        self.methods = [callback for callback in callbacks if isinstance(callback, FederatedMethod)]
        self.sampler.validate(data.num_clients)
        cohort = self.sampler.per_round - (self.faults.extra or 0)
        self.aggregator.validate(cohort)
        self.solver.validate(module.net, data)
        validate_methods(
            Setup(
                self.sampler, self.solver, self.aggregator, self.stores, data, module, self.methods, self.rounds, cohort
            )
        )
        self.data = data

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stores.release()

    def state_dict(self) -> dict[str, Any]:
        return {"stores": self.stores.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stores.load_state_dict(state_dict["stores"])

    # ------------------------------------------------------------------------------------------------ one round
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Lets the cohort train and leaves the pseudo-gradient −Δ in the global network."""
        assert isinstance(pl_module, FederatedModule)
        self._started = time.perf_counter()
        net, device, data, before = pl_module.net, pl_module.device, self.data, broadcast_state(pl_module.net)
        drawn = self.sampler(trainer.global_step, data.num_clients, self.seed)
        came = self.faults.survivors(drawn, self._steps(drawn, trainer.global_step), trainer.global_step, self.seed)
        round = self.round = Round(
            index=trainer.global_step,
            seed=self.seed,
            cohort=came,
            lost=len(drawn) - len(came),
            num_clients=data.num_clients,
            start=dict(before),
            reduce=sum_over_processes,
            lr=self.solver.lr(trainer.global_step),
            server=trainer.optimizers[0],
        )
        cohort = len(round.cohort)
        round.down_bytes = round.receivers * nbytes(round.start)
        for method in self.methods:
            method.on_broadcast(round)

        stats = torch.zeros(4, dtype=torch.float64, device=device)  # Σ loss, its clients, finite clients, bytes up
        shapes = upload_shapes(self.methods, round)
        extra = {name: self.aggregator.beside() for name in shapes if name != "delta"}
        net.train()
        stacks = self.stacks(trainer, round.cohort)
        _, streams = self.layout(pl_module)
        with streams.round():
            for clients in stacks:
                with streams.stack():
                    trained = self.train_clients(trainer, pl_module, clients, round)
                    with streams.in_turn():
                        stats += self._receive(*trained, extra, round)
                    del trained  # nothing holds the uploads while the next stack trains
        update = self.aggregator.reduce(round, shapes["delta"])
        round.received = {name: part.reduce(round, shapes[name]) for name, part in extra.items()}

        results = [{name: t.unsqueeze(0) for name, t in part.items()} for part in (update, *round.received.values())]
        overflown = ~torch.cat([finite_clients(part) for part in results]).all(0, keepdim=True)
        (stats,) = round.reduce(
            [torch.cat([stats, overflown, on_device([round.samples, round.steps], device, stats.dtype)])]
        )
        # The round's one wait for the device:
        loss, counted, num_finite, up_bytes, refused, samples, steps = stats.tolist()
        self.stores.finish_round(round)  # after it: only now has every process sent, so written, what it has
        round.num_finite = int(num_finite)
        usable = round.num_finite > 0 and not refused
        if usable:
            for method in self.methods:
                method.on_aggregate_end(update, round)
        pl_module.set_update(update if usable else None, before)
        if round.num_finite < cohort and trainer.is_global_zero:
            _warn_not_finite(round)
        self.row = {
            "round": round.index + 1,
            "train/loss": loss / counted if counted else float("nan"),
            "train/clients": cohort,
            "train/nonfinite_clients": cohort - round.num_finite,
            "train/refused_steps": int(refused > 0),
            "train/samples": int(samples),
            "train/steps": int(steps),
            "comm/down_bytes": round.down_bytes,
            "comm/up_bytes": int(up_bytes),
            "time/train_s": time.perf_counter() - self._started,
        }
        if self.faults != Faults():
            planned, done = self.solver.num_steps(data.sizes(came)), self._steps(came, round.index)
            self.row |= {"train/dropped_clients": round.lost, "train/stragglers": int((done < planned).sum())}

    def _steps(self, clients: np.ndarray, round_index: int) -> np.ndarray:
        """Local steps that these clients do in a round, ``[K]``."""
        return self.faults.steps(self.solver.num_steps(self.data.sizes(clients)), clients, round_index, self.seed)

    def stacks(self, trainer: Trainer, cohort: np.ndarray) -> list[np.ndarray]:
        """This process's share of a cohort, as the ids of one stack after the other."""
        module = trainer.lightning_module
        assert isinstance(module, FederatedModule)
        mine = assign(cohort, self._steps(cohort, trainer.global_step), trainer.global_rank, trainer.world_size)
        k, _ = self.layout(module)
        return np.split(mine, range(k, len(mine), k)) if len(mine) else []

    def layout(self, module: FederatedModule) -> tuple[int, Streams]:
        """K, the clients of a stack, and the streams that stacks train on; found once the network is on its device."""
        if self._layout is None:
            client, device, cohort = self.solver, module.device, self.sampler.per_round
            largest = int(self.data.sizes(np.arange(self.data.num_clients)).max())  # of the clients: no batch is larger
            k, streams = layout(client.stack, min(client.batch_size, largest), cohort, module.net, device, self.data)
            self._layout = k, Streams(module.device, streams)
        return self._layout

    def train_clients(
        self, trainer: Trainer, pl_module: FederatedModule, clients: np.ndarray, round: Round
    ) -> tuple[Upload, torch.Tensor]:
        """K clients of the cohort, side by side: broadcast, local training, upload; and their losses, ``[K]``."""
        data, methods, num_samples = self.data, self.methods, self.data.sizes(clients)
        plan = self.solver.plan(data, clients, round, pl_module.device)
        steps = self.faults.steps(plan.steps, clients, round.index, round.seed)
        if (steps < plan.steps).any():
            plan = plan.cut(steps)
        round.samples += int(plan.counts.sum())
        round.steps += int(plan.steps.sum())
        _seed_dropout(pl_module.device, torch_seed(round.seed, "dropout", round.index, int(clients[0])))
        stack = ClientStack(
            pl_module.net, round.start, clients, num_samples, plan.steps,
            tap_features=any(method.needs_features for method in methods),
            tap_stages=any(method.needs_stages for method in methods),
            task=pl_module.task,
        )  # fmt: skip
        pl_module.clients = stack
        for method in methods:
            method.on_clients_start(stack, round)
        autocast = trainer.precision_plugin.forward_context
        hook, recorder = pl_module.after_backward(), self._recorder(trainer, pl_module)
        loss_K = self.solver.train(stack, plan, data, round, methods, hook, autocast, recorder)
        pl_module.clients = None
        with self.layout(pl_module)[1].in_turn():
            for method in methods:
                method.on_clients_end(stack, round)
            delta = stack.delta()
            upload = Upload(clients, num_samples, plan.steps, delta, finite_clients(delta), nbytes(round.start))
            for method in methods:
                method.on_upload(upload, round)
            if any(type(method).on_upload is not FederatedMethod.on_upload for method in methods):
                for tensors in (upload.delta, *upload.extra.values()):
                    upload.finite = upload.finite & finite_clients(tensors)
        return upload, loss_K

    def _recorder(self, trainer: Trainer, pl_module: FederatedModule) -> Recorder | None:
        """What records local steps, if all that takes part in them allows it."""
        others = [c for c in trainer.callbacks if not isinstance(c, FederatedMethod)]  # type: ignore[attr-defined]
        if any(type(other).on_after_backward is not Callback.on_after_backward for other in others):
            return None
        if not all(method.graphable for method in self.methods if method.in_steps):
            return None
        return self.solver.recorder(pl_module.net, pl_module.device)

    def _receive(
        self, upload: Upload, loss_K: torch.Tensor, extra: dict[str, Aggregator], round: Round
    ) -> torch.Tensor:
        """The server takes in K uploads; what a round counts of them, as in ``stats``.

        A function of its own, so that nothing holds the uploads while the next stack trains.
        """
        for method in self.methods:
            method.on_receive(upload, round)
        for name, tensors in upload.extra.items():
            extra[name].add(replace(upload, delta=tensors), round)
        self.aggregator.add(upload, round)
        finite = upload.finite & loss_K.isfinite()
        counts = [loss_K.where(finite, 0.0).double().sum(), finite.sum(), upload.finite.sum()]
        sent = torch.full_like(loss_K[0], len(loss_K) * upload.bytes_per_client, dtype=torch.float64)
        return torch.stack([*(count.double() for count in counts), sent])

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
        for method in self.methods:
            method.on_round_end(self.row, self.round)
        self.row["time/round_s"] = time.perf_counter() - self._started
        row, self.row = self.row, {}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=row["round"])
        self.last_row = row


def _warn_not_finite(round: Round) -> None:
    cohort = len(round.cohort)
    log.warning(
        "round %d: %d of %d clients sent numbers that are not finite; %s. Lower client.optimizer.lr or set "
        "client.clip_norm.",
        round.index + 1,
        cohort - round.num_finite,
        cohort,
        "they are left out" if round.num_finite else "the model stays as it was",
    )


def _seed_dropout(device: torch.device, seed: int) -> None:
    # torch.manual_seed would queue a call, with its traceback, for every backend that this machine lacks.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
