"""One run, from a composed config to its summary: what ``src/train.py`` and ``src/eval.py`` call."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from gcfed.data.label_counts import label_counts
from gcfed.federated.loop import FederatedLoop
from gcfed.federated.method import FederatedMethod
from gcfed.federated.module import FederatedModule
from gcfed.federated.spread import spread, trains_on_cpu
from gcfed.federated.strategy import can_fork
from gcfed.metrics.relative_error import relative_error
from gcfed.runs.checkpoint import (
    RunRecord,
    check_checkpoint,
    existing,
    load_checkpoint,
    load_weights,
    resume_from,
)
from gcfed.runs.failure import failure_recorded
from gcfed.runs.folder import CHECKPOINT, CONFIG, METRICS, SUMMARY, divergence
from gcfed.runs.identity import hyperparameters, identity, setting
from gcfed.runs.metrics_csv import read_metrics
from gcfed.runs.summary import last_figures, print_summary, write_summary
from gcfed.utils.cpu import cores, keep_freed_memory, present_memory
from gcfed.utils.files import replacing
from gcfed.utils.instantiate import build, build_all
from gcfed.utils.pictures import show
from gcfed.utils.processes import one_of_several
from gcfed.utils.rng import torch_seed

log = logging.getLogger(__name__)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # tips and device lists; errors still come through
logging.getLogger("lightning.fabric.utilities.distributed").setLevel(logging.WARNING)  # a line a process
logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # debug=profiler prints its table
warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # lightning 2.6 under torch 2.15
warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")  # a batch is a round: nothing to resume

PRECISIONS = ("32-true", "bf16-mixed", "64-true")


@dataclass
class RunResult:
    """What a finished run leaves in memory; everything else lies in ``folder``."""

    folder: Path
    metrics: dict[str, float]
    module: FederatedModule
    trainer: Trainer
    loop: FederatedLoop


@contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the process with the sentence of an error that names its key or file, without the frames that led to it.

    Not in a sweep, whose other jobs go on, nor under HYDRA_FULL_ERROR=1.
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        log.error("%s (HYDRA_FULL_ERROR=1 shows where)", error)
        raise SystemExit(1) from None


def train(cfg: DictConfig) -> RunResult:
    """Trains as configured, resumes where ``ckpt_path`` says so, and writes the run's folder.

    Raises:
        ValueError: a setting that cannot work; names the key and the remedy, before the first round.
        FileNotFoundError: data or a checkpoint that is not there.
    """
    check(cfg)
    keep_freed_memory()
    torch.set_num_threads(min(torch.get_num_threads(), cores()))
    folder = Path(cfg.paths.output_dir)
    checkpoint = resume_from(cfg.ckpt_path, folder)
    if one_of_several() and checkpoint is None and (folder / CHECKPOINT).is_file():
        raise ValueError(
            f"{folder} holds a run of a job of this name: continue it with ckpt_path=last, or rename the job."
        )
    seed_everything(torch_seed(cfg.seed, "initialisation") % 2**32, verbose=False)
    module = build_module(cfg)
    resume_round = 0
    if checkpoint is not None:
        resume_round = check_checkpoint(checkpoint, cfg, module)
        log.info("resuming %s after round %d", folder, resume_round)

    data = build(cfg.data)
    data.setup()
    if module.task.has_classes != (data.labels.dtype.kind == "i"):
        raise ValueError(f"task._target_={cfg.task._target_} does not go with the labels of data={cfg.tags.data}.")
    methods, measurements = build_methods(cfg), build_all(cfg.metrics)
    loop = FederatedLoop(
        sampler=build(cfg.participation.sampler),
        solver=build(cfg.client),
        aggregator=build(cfg.aggregator),
        rounds=cfg.rounds,
        seed=cfg.seed,
        eval_every=cfg.eval_every,
        stores=build(cfg.client_store),
    )
    callbacks: list[Callback] = [loop, *methods, RunRecord(cfg), *measurements, *build_all(cfg.callbacks)]
    loop.bind(callbacks, data, module)
    loop.stores.require_folder()
    warn_of_memory(loop, module, data.num_clients)
    loggers: list[Logger] = build_all(cfg.logger, resume_round=resume_round)
    layout = spread(cfg.trainer, loop, module, data.num_test)
    if "enable_progress_bar" not in cfg.trainer:  # without ours, Lightning would draw its own
        layout["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    trainer: Trainer = build(cfg.trainer, **layout, callbacks=callbacks, logger=loggers)

    with failure_recorded(folder, write=trainer.is_global_zero):  # from here on the settings are accepted
        if trainer.is_global_zero:
            write_inputs(cfg, data, folder)
            if checkpoint is None:
                (folder / SUMMARY).unlink(missing_ok=True)  # of a run that was here before
            log.info(describe(module, data, loop, methods, trainer))
        for logger in loggers:
            logger.log_hyperparams(hyperparameters(cfg))
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)

        if trainer.is_global_zero:
            finish(cfg, data, folder, trainer)
    metrics = {k: float(v) for k, v in {**trainer.callback_metrics, **loop.last_row}.items()}
    return RunResult(folder, metrics, module, trainer, loop)


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Tests the global model of a checkpoint on the test split of the run that wrote it."""
    path = existing(cfg.ckpt_path, "ckpt_path")
    checkpoint = load_checkpoint(path)
    run = OmegaConf.merge(checkpoint["gcfed"]["config"], {"paths": cfg.paths}, cfg.override or {})
    assert isinstance(run, DictConfig)
    module = build_module(run)
    load_weights(module, checkpoint, path)
    data = build(run.data)
    trainer: Trainer = build(cfg.trainer)
    trainer.validate(module, datamodule=data, verbose=False)
    metrics = {key: float(trainer.callback_metrics[key]) for key in module.task.columns}
    params = dict(module.net.cpu().named_parameters())
    optimum = {name: torch.from_numpy(array) for name, array in (data.dataset.optimum or {}).items()}
    if optimum and optimum.keys() == params.keys():
        metrics["test/relative_error"] = relative_error(params, optimum)
    return {"round": checkpoint["global_step"], **metrics}


def check(cfg: DictConfig) -> None:
    """Refuses what cannot work before anything is built."""
    refuse_sweeps()
    for key in ("precision", "trainer.precision"):
        precision = OmegaConf.select(cfg, key)
        if precision not in PRECISIONS:
            raise ValueError(
                f"{key}={precision} is not supported: choose {', '.join(PRECISIONS)}. 16-mixed scales the loss, so "
                "gradient hooks (GC, SCAFFOLD, clipping) would see scaled gradients."
            )
    for key, of_trainer in (("precision", "trainer.precision"), ("rounds", "trainer.max_steps")):
        mine, its = OmegaConf.select(cfg, key), OmegaConf.select(cfg, of_trainer)
        if its not in (None, mine):  # a run is known by its own
            raise ValueError(f"{of_trainer}={its} is not {key}={mine}: set {key}={its}, which the trainer follows.")
    for key, least in (("rounds", 1), ("eval_every", 1), ("participation.per_round", 1), ("seed", 0)):
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{key}={value} must be a whole number of at least {least}.")
    if not OmegaConf.is_list(cfg.targets) or not all(isinstance(t, int | float) for t in cfg.targets):
        raise ValueError(f"targets={cfg.targets} must be a list of accuracies, such as targets=[0.5,0.6].")
    if not isinstance(cfg.channels_last, bool):
        raise ValueError(f"channels_last={cfg.channels_last} must be true or false.")
    reads_text = "last_only" in inspect.signature(get_object(cfg.model._target_)).parameters
    is_text = cfg.data.transform._target_.endswith("TextTransform")
    if is_text and not reads_text:
        raise ValueError(f"data={cfg.tags.data} is text, which model={cfg.tags.model} cannot read: take model=lstm.")
    sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    forks = can_fork() and trains_on_cpu(cfg.trainer.accelerator)
    alone = cfg.trainer.get("strategy") is None or "LOCAL_RANK" in os.environ or forks
    if sweep and not alone:
        raise ValueError("-m with trainer=ddp would start a sweep in every process: give each job a command.")


def refuse_sweeps() -> None:
    """Refuses a study or a search that was composed as a run: with ``-m`` their sweepers make the runs."""
    if not HydraConfig.initialized():
        return
    hydra = HydraConfig.get()
    study, search = (hydra.runtime.choices.get(group) for group in ("study", "hparams_search"))
    if study is not None:  # the jobs of a study are composed without it
        raise ValueError(f"study={study} is a sweep of its own: python src/train.py -m study=<one of configs/study> …")
    if search is not None and hydra.mode != RunMode.MULTIRUN:
        raise ValueError(f"hparams_search={search} is a sweep: python src/train.py -m hparams_search={search} …")


def write_inputs(cfg: DictConfig, data: Any, folder: Path) -> None:
    """What the run was made of: its config, under the overrides that it was started with, and its partition."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []  # from Python there are none
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(f"# python src/train.py {shlex.join(overrides)}\n{OmegaConf.to_yaml(cfg, resolve=True)}")
    data.partition.save(folder / "partition.npz")
    if (held := label_counts(data)) is not None:
        held.save(folder)


def finish(cfg: DictConfig, data: Any, folder: Path, trainer: Trainer) -> None:
    """The summary of a run that has come to its end, its pictures, and its last figures for those who compare runs."""
    about = {"identity": identity(cfg), "setting": setting(cfg)}
    summary = write_summary(folder, cfg.targets, processes=trainer.world_size, about=about)
    if not summary:
        return
    metrics = read_metrics(folder / METRICS)
    if cfg.extras.figures:
        from gcfed.plots.curves import plot_curves  # matplotlib
        from gcfed.plots.partition import draw_partition

        plot_curves(metrics, folder / "curves.png")
        show(trainer.loggers, "curves", folder / "curves.png", summary["rounds"])
        if not (folder / "partition.png").is_file():
            draw_partition(folder, data)
    print_summary(summary, folder)
    for logger in trainer.loggers:
        if hasattr(logger, "log_summary"):
            figures = last_figures(summary, metrics)
            logger.log_summary(figures, summary["rounds"], success=not divergence(metrics))


def build_methods(cfg: DictConfig) -> list[FederatedMethod]:
    """The ingredients of the algorithm, in the order in which their hooks run.

    GC comes after all that correct gradients: P·(corrected gradient).
    """
    methods = [*build_all(cfg.methods), build(cfg.gc), build(cfg.quantization)]
    return sorted((m for m in methods if m is not None), key=lambda m: m.order)


def build_module(cfg: DictConfig) -> FederatedModule:
    """The global network under its server optimizer."""
    net = build(cfg.model)
    if cfg.precision == "64-true":  # Lightning converts it too, but only after a checkpoint was loaded into it
        net = net.double()
    return FederatedModule(net, build(cfg.server), task=build(cfg.task), channels_last=cfg.channels_last)


def warn_of_memory(loop: FederatedLoop, module: FederatedModule, num_clients: int) -> None:
    """Says so when the clients' states, once all have taken part, would fill the memory."""
    needed = loop.stores.bytes_of(num_clients, sum(p.nbytes for p in module.net.parameters()))
    present = present_memory()
    if loop.stores.kind == "memory" and needed > 0.5 * present:
        log.warning(
            "the states of all %s clients will take %.0f GB of this machine's %.0f: take client_store=disk",
            f"{num_clients:,}",
            needed / 1e9,
            present / 1e9,
        )


def describe(
    module: FederatedModule, data: Any, loop: FederatedLoop, methods: list[FederatedMethod], trainer: Trainer
) -> str:
    """One line on what is about to run."""
    device, processes = trainer.strategy.root_device, trainer.world_size
    parameters = sum(p.numel() for p in module.net.parameters())
    k = loop.solver.stack_size(module.net, device, loop.sampler.per_round)
    where = f"{k} at once on {device}" + (f" in each of {processes} processes" if processes > 1 else "")
    names = ", ".join(type(m).__name__ for m in methods) or "none"
    sizes = data.partition.sizes
    return (
        f"{type(module.net).__name__} with {parameters:,} parameters; {data.num_clients:,} clients with "
        f"{sizes.min()} to {sizes.max()} samples; {loop.sampler}, {where}; methods: {names}"
    )
