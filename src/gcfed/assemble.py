"""From a composed config to the parts of a run, each checked, none trained."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from lightning.pytorch import Callback, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.sampling import cohort_size
from gcfed.federated.loop import FederatedLoop
from gcfed.federated.method import FederatedMethod
from gcfed.federated.module import FederatedModule
from gcfed.federated.spread import trains_on_cpu
from gcfed.federated.strategy import can_fork
from gcfed.utils.instantiate import build, build_all
from gcfed.utils.rng import torch_seed

log = logging.getLogger(__name__)

PRECISIONS = ("32-true", "bf16-mixed", "64-true")


@dataclass
class Parts:
    """What a run is made of; ``methods`` and ``callbacks``, the loop first, in the order of their hooks."""

    module: FederatedModule
    data: FederatedDataModule
    loop: FederatedLoop
    methods: list[FederatedMethod]
    callbacks: list[Callback]


def assemble(cfg: DictConfig) -> Parts:
    """Builds all parts of a run but its trainer and loggers, and lets each refuse what it cannot work with.

    Raises:
        ValueError: a setting that cannot work; names the key and the remedy.
        FileNotFoundError: data that are not there.
    """
    check(cfg)
    module = build_module(cfg)
    data = build(cfg.data)
    data.setup()
    if module.task.has_classes != (data.labels.dtype.kind == "i"):
        raise ValueError(f"task._target_={cfg.task._target_} does not go with the labels of data={cfg.tags.data}.")
    methods = build_methods(cfg)
    sampler = cfg.participation.sampler
    size = {"per_round": cohort_size(sampler.per_round, data.num_clients)} if "per_round" in sampler else {}
    loop = FederatedLoop(
        sampler=build(sampler, **size),
        solver=build(cfg.client),
        aggregator=build(cfg.aggregator),
        rounds=cfg.rounds,
        seed=cfg.seed,
        eval_every=cfg.eval_every,
        stores=build(cfg.client_store),
    )
    callbacks: list[Callback] = [loop, *methods, *build_all(cfg.metrics), *build_all(cfg.callbacks)]
    loop.bind(callbacks, data, module)
    loop.stores.require_folder()
    warn_of_disk(loop, module, data.num_clients)
    return Parts(module, data, loop, methods, callbacks)


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
        share = key == "participation.per_round" and isinstance(value, float) and 0 < value < 1
        if not share and (not isinstance(value, int) or value < least):
            or_share = ", or a share of the clients below 1" if key == "participation.per_round" else ""
            raise ValueError(f"{key}={value} must be a whole number of at least {least}{or_share}.")
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


def build_methods(cfg: DictConfig) -> list[FederatedMethod]:
    """The ingredients of the algorithm, in the order in which their hooks run.

    GC comes after all that correct gradients: P·(corrected gradient).
    """
    methods = [*build_all(cfg.methods), build(cfg.gc), build(cfg.quantization)]
    return sorted((m for m in methods if m is not None), key=lambda m: m.order)


def build_module(cfg: DictConfig) -> FederatedModule:
    """The global network, initialised by the seed, under its server optimizer."""
    seed_everything(torch_seed(cfg.seed, "initialisation") % 2**32, verbose=False)
    net = build(cfg.model)
    if cfg.precision == "64-true":  # Lightning converts it too, but only after a checkpoint was loaded into it
        net = net.double()
    return FederatedModule(net, build(cfg.server), task=build(cfg.task), channels_last=cfg.channels_last)


def warn_of_disk(loop: FederatedLoop, module: FederatedModule, num_clients: int) -> None:
    """Says so when the clients' states, once all have taken part, would fill the disk."""
    needed = loop.stores.bytes_of(num_clients, sum(p.nbytes for p in module.net.parameters()))
    folder = (loop.stores.folder or Path()).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        log.warning(
            "the states of all %s clients will take %.0f GB, and %s has %.0f: set client_store.folder",
            f"{num_clients:,}",
            needed / 1e9,
            folder,
            free / 1e9,
        )


def describe(parts: Parts, trainer: Trainer) -> str:
    """One line on what is about to run."""
    loop, net, data = parts.loop, parts.module.net, parts.data
    device, processes = trainer.strategy.root_device, trainer.world_size
    k = loop.solver.stack_size(net, device, loop.sampler.per_round)
    where = f"{k} at once on {device}" + (f" in each of {processes} processes" if processes > 1 else "")
    names = ", ".join(type(m).__name__ for m in parts.methods) or "none"
    assert data.partition is not None
    sizes = data.partition.sizes
    return (
        f"{type(net).__name__} with {sum(p.numel() for p in net.parameters()):,} parameters; {data.num_clients:,} "
        f"clients with {sizes.min()} to {sizes.max()} samples; {loop.sampler}, {where}; methods: {names}"
    )
