"""Builds what a run is made of from a checked config: data, network, loop, methods, metrics; then
the trainer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf, open_dict

from gcfed.callbacks.after_round import SmoothedAccuracy
from gcfed.check import check
from gcfed.data.checks import check_labels, check_samples
from gcfed.data.datamodule import DATASET, FederatedDataModule
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.module import FederatedModule, watches_steps
from gcfed.federated.parallel.strategy import spread, trains_on_cpu
from gcfed.federated.parts import ClientPart, Part, ServerPart
from gcfed.federated.parts.method import parts_of, result_of
from gcfed.federated.state.store import ClientStores
from gcfed.folders.identity import digest
from gcfed.folders.run_columns import RunColumns
from gcfed.methods.personal.local_norm import LocalNorm
from gcfed.methods.subspace.adapters import AVERAGES
from gcfed.models.build import build_net
from gcfed.optim.partial import MakeOptimizer, first_move
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.sampling import number_of_clients
from gcfed.participation.schedule import Participation
from gcfed.tasks import Task
from gcfed.utils.checked import SettingError
from gcfed.utils.instantiate import build_all, optional, require, target_of, typed_key
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import seed_generators, torch_seed

log = logging.getLogger(__name__)
MANY_CLIENTS = 2**31  # where the data have not been read, and their clients not been counted


@dataclass
class Assembly:
    """What a run is made of, except for its trainer and loggers.

    ``methods`` and ``callbacks`` are in the order of their hooks; the loop comes first.
    """

    module: FederatedModule
    data: FederatedDataModule
    loop: FederatedLoop
    methods: list[Part]
    callbacks: list[Callback]
    result: str  # the column that the methods declare as their result, or ""

    def __str__(self) -> str:
        """The first line of a run: network, clients, methods, aggregator."""
        net = self.module.net
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        number = sum(parameter.numel() for parameter in trained)
        titles = dict.fromkeys(part.title for part in self.methods)
        clauses = [
            f"{type(net).__name__} with {number:,} trained parameters",
            f"{self.data.num_clients:,} clients",
            str(self.loop.sampler),
            f"methods: {', '.join(titles) or 'none'}",
            f"aggregator: {self._aggregator()}",
        ]
        return "; ".join(clauses)

    def _aggregator(self) -> str:
        """Names the aggregator.

        If no method takes part in aggregation, the text of an unweighted mean also names the
        setting of McMahan et al., who weight clients by their samples.
        """
        aggregator = self.loop.aggregator
        weighting = getattr(aggregator, "weighting", None)
        if weighting is None:
            return type(aggregator).__name__
        if weighting == "samples":
            return "mean weighted by samples"
        if any(isinstance(part, ServerPart) for part in self.methods):
            return "unweighted mean"
        return "unweighted mean (aggregator=weighted_mean weights clients by their samples)"


def assemble(cfg: DictConfig, *, clients_only: bool = False) -> Assembly:
    """Builds all that a run is made of except for its trainer and loggers.

    Args:
        clients_only: build the side of some clients, without server parts. Their data may be too
            few to learn from.

    Raises Refusal if a setting cannot work, and FileNotFoundError if data do not exist.
    """
    data = read_data(cfg)
    if not clients_only:
        check_samples(data)
    module = build_module(fill_from_data(cfg, data), data)
    check_labels(data, module.net, module.task)
    if not clients_only:
        _warn_of_long_steps(module.make_optimizer)
    parts = _build_parts(cfg, data.num_clients, ClientPart if clients_only else Part)
    result = result_of(parts.methods)
    loop = parts.loop
    loop.bind(parts.in_order, data, module)
    written = columns_of_parts(
        loop,
        module.task,
        parts.in_order,
        has_validation="validation" in data.splits,
        has_client_tests=bool(getattr(data, "client_test", None)),
    )
    refuse_unwritten(parts.in_order, written)
    if loop.run.setup.transport.separate_clients:
        _refuse_client_callbacks(parts.callbacks)
    _warn_of_client_callbacks(parts.callbacks)
    loop.run.setup.stores.require_folder()
    return Assembly(module, data, loop, parts.methods, parts.in_order, result)


@dataclass(frozen=True)
class _Parts:
    """The parts of a run that need neither data nor network to be built."""

    loop: FederatedLoop
    methods: list[Part]
    metrics: list[Part]
    callbacks: list[Callback]  # those of the config's group ``callbacks``

    @property
    def in_order(self) -> list[Callback]:
        """All parts, in the order of their hooks."""
        return [self.loop, *self.methods, *self.metrics, *self.callbacks]


def _build_parts(cfg: DictConfig, num_clients: int, kind: type[Part] = Part) -> _Parts:
    """The loop, and the methods and metrics of this kind. Raises Refusal."""
    loop = build_loop(cfg, num_clients)
    methods = [part for part in build_methods(cfg) if isinstance(part, kind)]
    metrics = [part for part in parts_of(build_all(cfg, "metrics")) if isinstance(part, kind)]
    return _Parts(loop, methods, metrics, build_all(cfg, "callbacks", Callback))


def check_buildable(cfg: DictConfig) -> RunColumns:
    """Checks the settings of a run, builds what needs no data, and drops it. Returns what the run
    writes.

    Several runs are checked so before the first one begins.

    Raises Refusal if a setting cannot work.
    """
    check(cfg)
    for key in ("data", "server"):
        require(cfg, key)
    task: Task = require(cfg, "task")
    if cfg.model.get("_target_") is not None:
        target_of(cfg.model)
    num_clients = cfg.participation.num_clients
    parts = _build_parts(cfg, MANY_CLIENTS if num_clients is None else num_clients)
    written = columns_of_parts(
        parts.loop,
        task,
        parts.in_order,
        # data of the user's own may have splits of their own
        has_validation=bool(cfg.data.get("validation", True)),
        has_client_tests=bool(cfg.data.get("client_test", True)),
    )
    refuse_unwritten(parts.in_order, written)
    return written


def columns_of_parts(
    loop: FederatedLoop,
    task: Task,
    callbacks: Sequence[Callback],
    *,
    has_validation: bool,
    has_client_tests: bool,
) -> RunColumns:
    """What a run of these parts writes.

    Args:
        callbacks: all parts, and the callbacks of the config.
        has_validation: whether the data have a validation split.
        has_client_tests: whether clients have test splits of their own.
    """
    columns = [*task.columns]
    if has_validation:
        columns += [f"val/{column.removeprefix('test/')}" for column in task.columns]
    columns += loop.columns
    is_open = False
    for part in callbacks:
        if not isinstance(part, ServerPart):
            continue
        if isinstance(part, SmoothedAccuracy) and "test/acc" not in task.columns:
            continue
        known = part.known_columns
        if known is None:
            is_open = True
        else:
            columns += known
    if not has_client_tests:
        columns = [column for column in columns if not column.startswith("personal/")]
    return RunColumns(tuple(dict.fromkeys(columns)), is_open)


def refuse_unwritten(callbacks: Sequence[Callback], written: RunColumns) -> None:
    """Raises Refusal if best.ckpt or early stopping watches a column that the run never writes.

    If a part may write any column, the watched one is looked for after the first test instead.
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            written.require(callback.monitor, f"monitor={callback.monitor}")


def start_at_random(cfg: DictConfig) -> None:
    """Lets the model of a config start at random, so that no weights are downloaded or read."""
    for key in {"weights", "pretrained", "start"} & cfg.model.keys():
        cfg.model[key] = False if key == "pretrained" else None


def read_data(cfg: DictConfig) -> FederatedDataModule:
    """The data of a config, loaded. Raises Refusal, with the key that the user typed, for a setting
    that cannot work.
    """
    data: FederatedDataModule = require(cfg, "data")
    try:
        data.setup()
    except SettingError as error:
        group, _, name = error.name.rpartition(".")
        if group != DATASET:
            raise
        raise Refusal(f"{typed_key(cfg.data.dataset, name)}{error.rest}") from None
    return data


def _refuse_client_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises Refusal for callbacks that take part in training: separate clients have methods and
    metrics only.
    """
    taking_part = [type(callback).__name__ for callback in callbacks if _takes_part(callback)]
    if taking_part:
        raise Refusal(
            f"callbacks: {taking_part[0]} takes part in local training, and clients have no"
            " callbacks: make it a ClientPart, under methods (docs/add-a-method.md)."
        )


def _warn_of_client_callbacks(callbacks: Sequence[Callback]) -> None:
    """Warns of callbacks that may change the results, because callbacks do not count in a run's
    identity.
    """
    for callback in filter(_takes_part, callbacks):
        log.warning(
            "callbacks: %s takes part in local training. If it changes the results, put it under"
            " methods: a report and ckpt_path=last take runs with and without a callback for the"
            " same",
            type(callback).__name__,
        )


def _takes_part(callback: Callback) -> bool:
    """Whether a callback takes part in local training."""
    return isinstance(callback, ClientPart) or watches_steps(callback)


def fill_from_data(cfg: DictConfig, data: FederatedDataModule) -> DictConfig:
    """A copy of the config. The loaded data fill in the shape, the number of classes and the number
    of tokens if they are null.
    """
    cfg = cfg.copy()
    with open_dict(cfg):
        _fill_shape(cfg, data)
        has_own_texts = "vocabulary" in cfg.model and "last_only" not in cfg.model
        if has_own_texts and cfg.model.vocabulary is None:
            cfg.model.vocabulary = _vocabulary(data)
        if has_own_texts or cfg.model.get("last_only", False) is None:
            cfg.model.last_only = data.labels.ndim == 1
    return cfg


def _fill_shape(cfg: DictConfig, data: FederatedDataModule) -> None:
    of_data = {"num_classes": data.num_classes, "input_shape": list(data.input_shape)}
    cfg.data.update(of_data)
    # in a run's config.yaml the model's keys no longer refer to the data's
    for key in of_data.keys() & cfg.model.keys():
        chosen = cfg.model[key]
        cfg.model[key] = of_data[key] if chosen is None else chosen
    chosen = cfg.model.get("num_classes")
    if isinstance(chosen, int) and chosen < data.num_classes:
        raise Refusal(
            f"model.num_classes={chosen}: the data have {data.num_classes} classes. Leave the key"
            " out."
        )


def _vocabulary(data: FederatedDataModule) -> int:
    """The number of tokens that the user's own texts need: at least 256, that of bytes."""
    tokens = [split.x for split in data.splits.values() if split.x.dtype.kind in "iu"]
    return max([256, *map(_tokens_needed, tokens)])


def _tokens_needed(x: np.ndarray) -> int:
    """The size of a vocabulary with all tokens of x. The last token stands for padding, which
    uint8 does not have.
    """
    padding = 0 if x.dtype == np.uint8 else 1
    return int(x.max()) + 1 + padding


def build_module(cfg: DictConfig, data: FederatedDataModule | None = None) -> FederatedModule:
    """The global network, initialised by the seed, with its server optimizer.

    Two samples of the data pass through a user's network first, and leave no mark in it.
    """
    seed_generators(torch.device("cpu"), torch_seed(cfg.seed, "initialisation") % 2**32)
    net = build_net(cfg, None if data is None else data.two_samples())
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise Refusal(
            f"model: no parameter of {type(net).__name__} has requires_grad: nothing would be"
            " trained."
        )
    return FederatedModule(
        net,
        require(cfg, "server"),
        task=require(cfg, "task"),
        channels_last=cfg.channels_last,
        eval_precision=cfg.get("eval_precision"),
    )


def build_loop(cfg: DictConfig, num_clients: int) -> FederatedLoop:
    """The loop over the rounds: who takes part, what clients do, and how the server combines their
    updates.
    """
    faults = optional(cfg.participation, "faults") or Faults()
    stores = _build_stores(cfg)
    federation = optional(cfg, "federation")
    return FederatedLoop(
        sampler=_build_sampler(cfg, faults, num_clients),
        solver=require(cfg, "client"),
        aggregator=require(cfg, "aggregator"),
        rounds=cfg.rounds,
        seed=cfg.seed,
        eval_every=cfg.eval_every,
        stores=stores,
        faults=faults,
        clock=optional(cfg.participation, "clock") or Clock(),
        federation=federation and partial(federation, cfg=cfg),
    )


def _build_sampler(cfg: DictConfig, faults: Faults, num_clients: int) -> Participation:
    sampler = require(cfg.participation, "sampler", **_sizes(cfg, faults, num_clients))
    if not isinstance(sampler, Participation):
        raise Refusal(
            f"participation.sampler: {type(sampler).__name__} is no sampler: make it a subclass of"
            " gcfed.participation.schedule.Sampler."
        )
    return sampler


def _sizes(cfg: DictConfig, faults: Faults, num_clients: int) -> dict[str, int]:
    """Those arguments of the sampler that may be shares of all clients, as numbers of clients."""
    sizes: dict[str, int] = {}
    sampler = cfg.participation.get("sampler")
    if sampler is None:
        return sizes
    if "per_round" in sampler:
        cohort = number_of_clients(sampler.per_round, num_clients, "participation.per_round")
        sizes["per_round"] = faults.drawn(cohort)
    if "concurrency" in sampler:
        key = "participation.sampler.concurrency"
        sizes["concurrency"] = number_of_clients(sampler.concurrency, num_clients, key)
    return sizes


def _build_stores(cfg: DictConfig) -> ClientStores:
    """The place of clients' states. Below a folder outside the run's, each run has its own."""
    stores: ClientStores = require(cfg, "client_store")
    run = Path(cfg.paths.output_dir).resolve()
    if stores.folder is not None and not stores.folder.resolve().is_relative_to(run):
        stores.use_folder(stores.folder / f"{run.name[:100]}-{digest({'': str(run)})}")
    return stores


def _warn_of_long_steps(server: MakeOptimizer) -> None:
    """Warns of an optimizer such as Adam, whose steps do not become shorter with the update."""
    update = 1e-3
    move = first_move(server, update)
    if move > 100 * update:
        log.warning(
            "server: a mean update of %g moves a weight by %.2g in the first round, which can ruin"
            " the model: lower server.lr, or take server=fedadam, whose rate is 0.01",
            update,
            move,
        )


def build_methods(cfg: DictConfig) -> list[Part]:
    """The ingredients of the algorithm, in the order of their hooks.

    GC projects the corrected gradient.
    """
    methods: list[Any] = []
    if cfg.model.get("norm_policy") == "local":
        methods.append(LocalNorm())
    average = OmegaConf.select(cfg, "model.lora.average")
    if average in AVERAGES:
        methods += AVERAGES[average]()
    methods += build_all(cfg, "methods")
    for key in ("gc", "privacy", "attack", "quantization"):
        method = optional(cfg, key)
        if method is not None:
            methods.append(method)
    return parts_of(methods)


def declared_result(cfg: DictConfig) -> str:
    """The column that the config's methods declare as their result; "" for the test of the global
    model.
    """
    return result_of(build_methods(cfg))


def models_in_memory(callbacks: Sequence[Callback]) -> int:
    """About how many models of float32 parameters a process of this run holds.

    An estimate from what ``benchmarks/memory.py`` measured (docs/performance.md has the numbers;
    some networks hold up to a third more): the global model, the broadcast one, a client's with
    gradients and momentum, the sum of updates, and what the allocator keeps.
    """
    models = 10
    for part in callbacks:
        if isinstance(part, ClientPart):  # the state as read, and its change
            models += 3 * len(part.keeps)
        if isinstance(part, ServerPart) and type(part).uploads is not ServerPart.uploads:
            models += 5  # what clients send, its sum, and what the server keeps
    return models


def build_trainer(
    cfg: DictConfig, assembly: Assembly, callbacks: Sequence[Callback], resume_round: int = 0
) -> Trainer:
    """The trainer with its loggers. It chooses the number of processes if the user has not."""
    layout = spread(
        cfg.trainer,
        assembly.loop.sampler.per_round,
        assembly.module.net,
        assembly.data.smallest_test,
        models_in_memory(callbacks),
    )
    if trains_on_cpu(cfg.trainer.accelerator):
        layout["accelerator"] = "cpu"  # Lightning's auto is mps on a Mac
    # Otherwise Lightning adds its own.
    for key, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if key not in cfg.trainer:
            layout[key] = any(isinstance(callback, kind) for callback in callbacks)
    loggers = build_all(cfg, "logger", Logger, resume_round=resume_round)
    return require(cfg, "trainer", **layout, callbacks=list(callbacks), logger=loggers)
