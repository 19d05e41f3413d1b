"""What cannot work is refused before anything is built: settings of the run as a whole, which no constructor sees."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from gcfed.federated.processes.strategy import can_fork, trains_on_cpu
from gcfed.utils.checked import Count, Share, Whole, fits
from gcfed.utils.compose import GROUPS_OF_CONFIGS, meant, walk
from gcfed.utils.machine import in_sweep
from gcfed.utils.resolvers import command

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
RANGES: dict[str, Any] = {
    "rounds": Count, "eval_every": Count, "seed": Whole, "precision_matmul": Literal["high", "medium"] | None,
    "targets": Sequence[Share], "optimized_metric": str | None,
    "client_store.folder": Annotated[str, Field(min_length=1)] | None,
    "channels_last": bool, "extras.figures": bool, "extras.print_config": bool | None,
    "trainer.num_nodes": Count | None, "trainer.enable_model_summary": bool | None,
    "trainer.accelerator": Literal["auto", "cpu", "gpu", "cuda"] | None,
}  # fmt: skip
FOLLOWED = {"precision": "precision", "rounds": "max_steps", "eval_every": "val_check_interval"}  # by the trainer's
FIXED = {  # of the trainer, under which a batch is a round and a test is of the whole split
    "max_epochs": -1, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
    "use_distributed_sampler": False, "fast_dev_run": False, "limit_train_batches": None, "limit_val_batches": None,
    "overfit_batches": 0.0, "gradient_clip_val": None, "gradient_clip_algorithm": None, "accumulate_grad_batches": 1,
}  # fmt: skip
PART = re.compile(r"gc|attack|quantization|participation\.faults|(methods|metrics|callbacks|logger)\.[^.]+")


def check(cfg: DictConfig) -> None:
    """Refuses what cannot work.

    Raises:
        ValueError: names the key and the remedy.
        TypeError: it is no config.
    """
    refuse_sweeps()
    if not isinstance(cfg, DictConfig):
        raise TypeError(f'a {type(cfg).__name__} is no config: gcfed.configure("rounds=2", "gc=none") makes one.')
    try:
        run: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(" ".join(str(error).split())) from None
    _refuse_settings_of_nothing(run)
    for key in GROUPS:
        if not isinstance(run.get(key), Mapping):
            raise ValueError(f"{key}={run.get(key)} must be a group of settings, as in configs/.")
    _refuse_unread(cfg)
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else run["tags"]
    for key in ("data", "model", "algorithm", "gc"):
        if key in run["tags"] and key not in choices:  # Hydra's way to say that there are several
            raise ValueError(f"{key}=[…] names several options: a run takes one; -m without brackets makes a run each.")
    if not re.fullmatch(r"(?!\.)[^/\\]+", name := str(run.get("name"))) or name != run["name"]:
        raise ValueError(f"name={name} must be a plain name.")
    if (precision := run.get("precision")) not in PRECISIONS:
        raise ValueError(
            f"precision={precision} is not supported: choose {', '.join(PRECISIONS)}. 16-mixed scales the loss, so "
            "gradient hooks (GC, SCAFFOLD, clipping) would see scaled gradients."
        )
    for key, hint in RANGES.items():
        group, _, name = key.rpartition(".")
        fits(key, (run[group] if group else run).get(name), hint)
    own = f"{run['paths']['output_dir']}/checkpoints"
    for name in ("checkpoint", "best"):
        part = (run.get("callbacks") or {}).get(name)
        if isinstance(part, Mapping) and (place := part.get("dirpath", own)) != own:
            raise ValueError(f"callbacks.{name}.dirpath={place} must be {own}, where a run looks for its checkpoints.")
    by, loader = run["partition"].get("by"), run["data"].get("dataset")
    if by is not None and "groups" not in (loader if isinstance(loader, Mapping) else {}):
        raise ValueError(
            f"partition.by={by} is read by nothing: data={run['tags'].get('data')} says whose samples are."
        )
    _check_trainer(run["trainer"], run)


def _check_trainer(trainer: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Refuses settings of Lightning's trainer under which a batch would not be a round, and devices not there."""
    for key, its in FOLLOWED.items():
        value = trainer.get(its, run[key])
        if repr(value) != repr(run[key]):  # a run is known by its own
            raise ValueError(f"trainer.{its}={value} is not {key}={run[key]}: set {key}, which it follows.")
    for key, value in FIXED.items():
        if repr(trainer.get(key, value)) != repr(value):
            remedy = "a batch of Lightning's is a round (docs/configuration.md)."
            raise ValueError(f"trainer.{key}={trainer[key]} must stay {value}: {remedy}")
    accelerator: Any = trainer.get("accelerator")
    devices = trainer.get("devices", "auto")
    if not isinstance(devices, str) and not (isinstance(devices, list) and devices):
        fits("trainer.devices", devices, Count | Literal["auto"])
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.accelerator={accelerator}: torch sees no GPU (CUDA) here. Take trainer=auto, or cpu."
        )
    forks = can_fork() and trains_on_cpu(accelerator)
    if in_sweep() and not (trainer.get("strategy") is None or "LOCAL_RANK" in os.environ or forks):
        raise ValueError("-m with trainer=ddp would start a sweep in every process: give each job a command.")


def _refuse_settings_of_nothing(run: Mapping[str, Any]) -> None:
    """Refuses settings of a part that is not there."""
    for key, node in walk(run):
        if isinstance(node, Mapping) and PART.fullmatch(key) and node.get("_target_") is None:
            # A model sets boundary and experiments the other two, whatever part is chosen.
            for name in node.keys() - {"_target_", "boundary", "layerwise", "every"}:
                part = f"{key}.{name}={node[name]} is read by nothing, since {key}._target_ names no part"
                raise ValueError(f"{part}: choose an option of {key.split('.')[0]}, or leave it out.")


def _refuse_unread(cfg: DictConfig) -> None:
    """Refuses keys that nothing reads, unless others follow them: those are settings of the user's own."""
    for group, known in READ.items():
        node = cfg[group] if group else cfg
        for key in (str(key) for key in node if key not in known):
            path = f"{group}.{key}".lstrip(".")
            # Those beside it may follow it by its last part.
            followed = rf"\$\{{\s*(?:{re.escape(path)}|\.+{re.escape(key)})\s*[.}}\[]"
            if not re.search(followed, OmegaConf.to_yaml(cfg)):
                if path in GROUPS_OF_CONFIGS and OmegaConf.is_dict(node[key]):
                    chosen = HydraConfig.get().runtime.choices.get(path) if HydraConfig.initialized() else "<name>"
                    raise ValueError(
                        f'{path}/{chosen}.yaml: its first line must be "# @package _global_". Without it, what it sets '
                        f"({', '.join(map(str, node[key]))}) lies under {path}, where nothing reads it."
                    )
                keys = [f"{group}.{key}".lstrip(".") for key in known] + ([] if group else GROUPS_OF_CONFIGS)
                remedy = meant(path, keys) or f"; ~{path} leaves it out."
                raise ValueError(f"{path}={node[key]} is read by nothing{remedy}")


def refuse_sweeps() -> None:
    """Refuses a search that was composed as a run: with ``-m`` its sweeper makes the runs."""
    if not HydraConfig.initialized():
        return
    hydra = HydraConfig.get()
    search = hydra.runtime.choices.get("hparams_search")
    if search is not None and not in_sweep():
        raise ValueError(f"hparams_search={search} is a sweep: {command('train')} -m hparams_search={search} …")
