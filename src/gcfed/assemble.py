"""From a composed config to the parts of a run, each checked, none trained."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gcfed.data.augment import TextTransform, VectorTransform
from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.sampling import cohort_size
from gcfed.federated.faults import Faults
from gcfed.federated.loop import FederatedLoop
from gcfed.federated.method import Part, parts_of
from gcfed.federated.module import FederatedModule
from gcfed.federated.processes.spread import spread, trains_on_cpu
from gcfed.federated.processes.strategy import can_fork
from gcfed.federated.store import ClientStores
from gcfed.methods.local_norm import LocalNorm
from gcfed.models.own import build_net
from gcfed.runs.identity import digest
from gcfed.utils.instantiate import build_all, optional, require
from gcfed.utils.number import choice, flag, number, numbers, word
from gcfed.utils.processes import in_sweep
from gcfed.utils.rng import torch_seed
from gcfed.utils.words import size

log = logging.getLogger(__name__)

PRECISIONS = ("32-true", "bf16-mixed", "64-true")
GROUPS = ("paths", "extras", "trainer", "client", "server", "participation", "client_store", "data", "model", "tags")
KEYS = (  # of the top level, beside these groups
    "name", "labels", "seed", "rounds", "eval_every", "task", "precision", "precision_matmul", "channels_last",
    "ckpt_path", "targets", "optimized_metric", "logger", "callbacks", "partition", "aggregator", "quantization",
    "metrics", "methods", "gc", "attack", "federation",
)  # fmt: skip
READ = {  # what a run may have at the top level, and in groups that are not built as a whole
    "": (*GROUPS, *KEYS), "participation": ("num_clients", "per_round", "sampler", "faults"),
    "extras": ("figures", "print_config"),
}  # fmt: skip
FOLLOWED = {"precision": "trainer.precision", "rounds": "trainer.max_steps", "eval_every": "trainer.val_check_interval"}
PART = re.compile(r"gc|attack|quantization|participation\.faults|(methods|metrics|callbacks|logger)\.[^.]+")
ROUNDS = {  # of the trainer, whose batch is a round
    "max_epochs": -1, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
    "use_distributed_sampler": False,
}  # fmt: skip


@dataclass
class Parts:
    """What a run is made of; ``methods`` and ``callbacks``, the loop first, in the order of their hooks."""

    module: FederatedModule
    data: FederatedDataModule
    loop: FederatedLoop
    methods: list[Part]
    callbacks: list[Callback]


def assemble(cfg: DictConfig) -> Parts:
    """Builds all parts of a run but its trainer and loggers, and lets each refuse what it cannot work with.

    Raises:
        ValueError: a setting that cannot work; names the key and the remedy.
        FileNotFoundError: data that are not there.
    """
    check(cfg)
    data: FederatedDataModule = require(cfg, "data")
    if not data.is_described:
        data.setup()
    module = build_module(described(cfg, data))
    is_text = isinstance(data.transform, TextTransform) and not isinstance(data.transform, VectorTransform)
    if is_text and not hasattr(module.net, "last_only"):
        raise ValueError(f"data={cfg.tags.data} is text, which model={cfg.tags.model} cannot read: take model=lstm.")
    if not is_text and hasattr(module.net, "last_only"):
        raise ValueError(f"model={cfg.tags.model} reads texts, which data={cfg.tags.data} is not: take model=mlp.")
    data.setup()
    if module.task.has_classes != (data.labels.dtype.kind == "i"):
        task = "gcfed.tasks.SquaredError for numbers, gcfed.tasks.Classification for classes, which are integers"
        raise ValueError(f"task._target_={cfg.task._target_} is not for labels of {data.labels.dtype}: {task}.")
    check_samples(data, module.task.has_classes, is_text)
    methods = build_methods(cfg)
    faults = optional(cfg.participation, "faults") or Faults()
    sampler = cfg.participation.get("sampler")
    shared = OmegaConf.is_dict(sampler) and "per_round" in sampler
    drawn = cohort_size(sampler.per_round, data.num_clients) + (faults.extra or 0) if shared else 0
    if faults.extra and drawn > data.num_clients:
        raise ValueError(
            f"participation.per_round and participation.faults.extra={faults.extra} make {drawn} clients a round, of "
            f"participation.num_clients={data.num_clients}."
        )
    size = {"per_round": drawn} if shared else {}
    federation = optional(cfg, "federation")
    loop = FederatedLoop(
        sampler=require(cfg.participation, "sampler", **size),
        solver=require(cfg, "client"),
        aggregator=require(cfg, "aggregator"),
        rounds=cfg.rounds,
        seed=cfg.seed,
        eval_every=cfg.eval_every,
        stores=client_stores(cfg),
        faults=faults,
        federation=federation and partial(federation, cfg=cfg),
    )
    callbacks: list[Callback] = [loop, *methods, *parts_of(build_all(cfg, "metrics")), *build_all(cfg, "callbacks")]
    loop.bind(callbacks, data, module)
    loop.stores.require_folder()
    warn_of_disk(loop, module, data.num_clients)
    return Parts(module, data, loop, methods, callbacks)


def check_samples(data: FederatedDataModule, has_classes: bool, is_text: bool) -> None:
    """Refuses data from which nothing can be learned, and warns of classes that are tested and never trained.

    Raises:
        ValueError: one class, or texts of one character, which stands for all that are unknown.
    """
    x = data.dataset.train.x
    if is_text and not any((x[i : i + 1000] != x.flat[0]).any() for i in range(0, len(x), 1000)):
        raise ValueError(f"data={data.dataset.name}: all characters of its texts are the same, or unknown.")
    if not has_classes:
        return
    trained, tested = (np.bincount(y[y >= 0], minlength=data.num_classes) for y in (data.labels, data.test_labels))
    present = np.flatnonzero(trained)
    if len(present) < 2:
        raise ValueError(f"data={data.dataset.name}: all training samples are of class {present}: nothing is to learn.")
    strange = np.flatnonzero((tested > 0) & (trained == 0))
    if len(strange) and data.labels.ndim == 1:  # of characters some are too rare
        log.warning("no training sample is of the classes %s, of which the test split has samples", strange.tolist())


def build_trainer(cfg: DictConfig, parts: Parts, callbacks: Sequence[Callback], resume_round: int = 0) -> Trainer:
    """The trainer with its loggers, laid out over processes where the user leaves that open.

    Raises:
        ValueError: a setting that cannot work; names the key.
    """
    layout = spread(cfg.trainer, parts.loop, parts.module, parts.data.smallest_test)
    if trains_on_cpu(cfg.trainer.accelerator):
        layout["accelerator"] = "cpu"  # which Lightning's auto is not on a Mac
    if "enable_progress_bar" not in cfg.trainer:  # without ours, Lightning would draw its own
        layout["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    loggers = build_all(cfg, "logger", resume_round=resume_round)
    return require(cfg, "trainer", **layout, callbacks=list(callbacks), logger=loggers)


def check(cfg: DictConfig) -> None:
    """Refuses what cannot work before anything is built."""
    refuse_sweeps()
    try:
        refuse_empty(OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException as error:
        raise ValueError(" ".join(str(error).split())) from None
    for key in GROUPS:
        if not OmegaConf.is_dict(cfg.get(key)):
            raise ValueError(f"{key}={cfg.get(key)} must be a group of settings, as in configs/.")
    for group, known in READ.items():
        node = cfg[group] if group else cfg
        for key in (str(key) for key in node if key not in known):
            path = f"{group}.{key}".lstrip(".")
            # A setting of the user's own, which others follow; from beside it by its last part.
            followed = rf"\$\{{\s*(?:{re.escape(path)}|\.+{re.escape(key)})\s*[.}}\[]"
            if not re.search(followed, OmegaConf.to_yaml(cfg)):
                near = get_close_matches(key, known, n=1)
                hint = f": did you mean {f'{group}.{near[0]}'.lstrip('.')}?" if near else f"; ~{path} leaves it out."
                raise ValueError(f"{path}={node[key]} is read by nothing{hint}")
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else cfg.tags
    for key in ("data", "model", "algorithm", "gc"):
        if key in cfg.tags and key not in choices:  # Hydra's way to say that there are several
            raise ValueError(f"{key}=[…] names several options: a run takes one; -m without brackets makes a run each.")
    folders = {f"paths.{name}": path for name, path in cfg.paths.items()}
    folders["data.dataset.data_dir"] = OmegaConf.select(cfg, "data.dataset.data_dir", default="")
    for key, value in {"name": cfg.get("name"), **folders}.items():
        if not isinstance(value, str) or (key == "name" and not re.fullmatch(r"(?!\.)[^/\\]+", value)):
            raise ValueError(f"{key}={value} must be {'a plain name' if key == 'name' else 'a folder'}.")
    for key in ("precision", "trainer.precision"):
        precision = OmegaConf.select(cfg, key)
        if precision not in PRECISIONS:
            raise ValueError(
                f"{key}={precision} is not supported: choose {', '.join(PRECISIONS)}. 16-mixed scales the loss, so "
                "gradient hooks (GC, SCAFFOLD, clipping) would see scaled gradients."
            )
    choice("precision_matmul", cfg.get("precision_matmul"), (None, "high", "medium"))
    for key, least in (("rounds", 1), ("eval_every", 1), ("seed", 0)):
        number(key, cfg.get(key), least, whole=True)
    for key, of_trainer in FOLLOWED.items():
        mine, its = OmegaConf.select(cfg, key), OmegaConf.select(cfg, of_trainer)
        if its is not None and repr(its) != repr(mine):  # a run is known by its own
            raise ValueError(f"{of_trainer}={its} is not {key}={mine}: set {key}={its}, which the trainer follows.")
    for key, value in ROUNDS.items():
        if repr(cfg.trainer.get(key, value)) != repr(value):
            raise ValueError(f"trainer.{key}={cfg.trainer[key]} must be {value}: a batch of Lightning's is a round.")
    devices = cfg.trainer.get("devices", "auto")
    if not isinstance(devices, str) and not (OmegaConf.is_list(devices) and devices):
        number("trainer.devices", devices, 1, whole=True, auto=True)
    if cfg.trainer.get("accelerator") in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.accelerator={cfg.trainer.accelerator}: torch sees no GPU (CUDA) here. Take trainer=auto, or cpu."
        )
    number("trainer.num_nodes", cfg.trainer.get("num_nodes", 1), 1, whole=True)
    number("trainer.limit_val_batches", cfg.trainer.get("limit_val_batches"), 0, above=True, none=True)
    numbers("targets", cfg.get("targets"), 0, 1)
    word("optimized_metric", cfg.get("optimized_metric"))
    word("client_store.folder", cfg.client_store.get("folder"))
    flag("channels_last", cfg.get("channels_last"))
    flag("extras.figures", cfg.extras.get("figures"))
    flag("extras.print_config", cfg.extras.get("print_config", False))
    flag("trainer.enable_model_summary", cfg.trainer.get("enable_model_summary", False))
    forks = can_fork() and trains_on_cpu(cfg.trainer.accelerator)
    alone = cfg.trainer.get("strategy") is None or "LOCAL_RANK" in os.environ or forks
    if in_sweep() and not alone:
        raise ValueError("-m with trainer=ddp would start a sweep in every process: give each job a command.")


def refuse_empty(node: Any, key: str = "") -> None:
    """Refuses empty texts, which are no names of anything, and settings of a part that is not there.

    Raises:
        ValueError: names the key.
    """
    if node == "":
        raise ValueError(f"{key}='' is empty: give it a value, or null where it may have none.")
    if not isinstance(node, Mapping):
        return
    if PART.fullmatch(key) and node.get("_target_") is None:
        for name in node.keys() - {"_target_", "boundary", "layer_boundary"}:  # a model sets these two, gc or not
            part = f"{key}.{name}={node[name]} is read by nothing, since {key}._target_ names no part"
            raise ValueError(f"{part}: choose an option of {key.split('.')[0]}, or leave it out.")
    for name, inner in node.items():
        refuse_empty(inner, f"{key}.{name}".lstrip("."))


def refuse_sweeps() -> None:
    """Refuses a study or a search that was composed as a run: with ``-m`` their sweepers make the runs."""
    if not HydraConfig.initialized():
        return
    hydra = HydraConfig.get()
    study, search = (hydra.runtime.choices.get(group) for group in ("study", "hparams_search"))
    if study is not None:  # the jobs of a study are composed without it
        raise ValueError(f"study={study} is a sweep of its own: python src/train.py -m study=<one of configs/study> …")
    if search is not None and not in_sweep():
        raise ValueError(f"hparams_search={search} is a sweep: python src/train.py -m hparams_search={search} …")


def build_methods(cfg: DictConfig) -> list[Part]:
    """The ingredients of the algorithm, in the order in which their hooks run.

    GC comes after all that correct gradients: P·(corrected gradient).
    """
    parts = [optional(cfg, key) for key in ("gc", "attack", "quantization")]
    own = [LocalNorm()] if cfg.model.get("norm_policy") == "local" else []
    methods = [*own, *build_all(cfg, "methods"), *parts]
    return parts_of(m for m in methods if m is not None)


def described(cfg: DictConfig, data: FederatedDataModule) -> DictConfig:
    """A config whose model is built for these data, also where it leaves their shape and classes open."""
    if "vocabulary" not in cfg.model and (cfg.data.num_classes, cfg.data.input_shape) == (
        data.num_classes,
        list(data.input_shape),
    ):
        return cfg
    cfg = cfg.copy()
    with open_dict(cfg):
        # The user's own texts, of whatever tokens; other sets say where their labels are.
        if "vocabulary" in cfg.model and "last_only" not in cfg.model:
            data.setup()
            cfg.model.vocabulary = cfg.model.vocabulary or 256
            cfg.model.last_only = data.labels.ndim == 1
        cfg.data.num_classes, cfg.data.input_shape = data.num_classes, list(data.input_shape)
    return cfg


def build_module(cfg: DictConfig) -> FederatedModule:
    """The global network, initialised by the seed, under its server optimizer."""
    seed_everything(torch_seed(cfg.seed, "initialisation") % 2**32, verbose=False)
    net = build_net(cfg)
    if cfg.precision == "64-true":  # Lightning converts it too, but only after a checkpoint was loaded into it
        net = net.double()
    return FederatedModule(net, require(cfg, "server"), task=require(cfg, "task"), channels_last=cfg.channels_last)


def client_stores(cfg: DictConfig) -> ClientStores:
    """Those of the config; a folder that is not in the run's own has a part for each run."""
    stores: ClientStores = require(cfg, "client_store")
    run = Path(cfg.paths.output_dir).resolve()
    if stores.folder is not None and not stores.folder.resolve().is_relative_to(run):
        stores.folder /= f"{run.name[:100]}-{digest({'': str(run)})}"
    return stores


def warn_of_disk(loop: FederatedLoop, module: FederatedModule, num_clients: int) -> None:
    """Says so when the clients' states, once all have taken part, would fill the disk."""
    needed = loop.stores.bytes_of(num_clients, sum(p.nbytes for p in module.net.parameters()))
    folder = (loop.stores.folder or Path()).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        log.warning(
            "the states of all %s clients will take %s, and %s has %s: set client_store.folder",
            f"{num_clients:,}",
            size(needed),
            folder,
            size(free),
        )


def describe(parts: Parts, trainer: Trainer) -> str:
    """One line on what is about to run."""
    loop, net, data = parts.loop, parts.module.net, parts.data
    device, processes = trainer.strategy.root_device, trainer.world_size
    k = {"auto": 1 if device.type == "cpu" else "as many as fit"}.get(str(loop.solver.stack), loop.solver.stack)
    where = f"{k} at once on {device}" + (f" in each of {processes} processes" if processes > 1 else "")
    names = ", ".join(dict.fromkeys(part.title for part in parts.methods)) or "none"
    assert data.partition is not None
    sizes = data.partition.sizes
    return (
        f"{type(net).__name__} with {sum(p.numel() for p in net.parameters()):,} parameters; {data.num_clients:,} "
        f"clients with {sizes.min()} to {sizes.max()} samples; {loop.sampler}, {where}; methods: {names}"
    )
