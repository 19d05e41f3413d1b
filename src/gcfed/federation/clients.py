"""The clients' side of a run, away from the server: what of the config goes there, and what is built of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from gcfed.assemble import assemble
from gcfed.federated.stacks import Stacks
from gcfed.utils.instantiate import check_targets

#: What clients need of a config; what runs on the server alone is not among it.
SENT = (
    "data", "model", "task", "client", "methods", "gc", "attack", "quantization", "metrics", "participation",
    "partition", "client_store", "seed", "rounds", "eval_every", "precision", "precision_matmul", "channels_last",
    "tags", "name",
)  # fmt: skip
#: In the place of what stays with the server.
PLAIN: dict[str, Any] = {
    "server": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 1.0},
    "aggregator": {"_target_": "gcfed.federated.aggregate.MeanAggregator"},
    "trainer": {"accelerator": "cpu"}, "extras": {"figures": False}, "targets": [], "callbacks": {}, "logger": {},
    "paths": {"root_dir": ".", "data_dir": "data", "log_dir": "logs", "output_dir": "."},
}  # fmt: skip
GROUPS = (
    "data", "model", "server", "partition", "client", "algorithm", "gc", "attack", "quantization", "metrics",
    "participation", "client_store",
)  # fmt: skip


def clients_config(cfg: DictConfig, *, paths: bool = True) -> bytes:
    """What the clients' side gets, as YAML.

    Args:
        cfg: the run's.
        paths: whether the folders of this machine are those of the other side; else they go as relative ones.
    """
    whole = OmegaConf.create(OmegaConf.to_container(cfg))
    if not paths:
        whole.paths = PLAIN["paths"]
    resolved: Any = OmegaConf.to_container(whole, resolve=True)
    return OmegaConf.to_yaml(OmegaConf.create({key: resolved[key] for key in SENT if key in resolved})).encode()


def as_run(config: Mapping[str, Any], folder: str, store: str) -> DictConfig:
    """What has come of a config, as a run's that writes to ``folder`` and keeps its clients' states in ``store``."""
    cfg = OmegaConf.create({**config, **PLAIN})
    cfg.trainer.precision, cfg.paths.output_dir, cfg.client_store.folder = cfg.precision, folder, store
    return cfg


def check_config(config: Mapping[str, Any], origin: str) -> None:
    """Refuses a config that would call what ours do not, or names files of the machine that it has come to.

    Raises:
        ValueError: names the key, and the site's own setting that allows it.
    """
    if unknown := sorted(set(config) - set(SENT)):
        raise ValueError(f"{origin}: its config has {unknown[0]}, which is not for clients.")
    check_targets(config, origin, GROUPS)
    for key, text in _texts(config):
        if PurePath(text).is_absolute() or ".." in PurePath(text).parts or re.match(r"~|\w+://", text):
            raise ValueError(
                f"{origin}: its config names {key}={text}, a place outside the site's own folder: give the site its "
                "data (arrays, folder, data_dir), or say trust_config: true in its gcfed.yaml."
            )


def _texts(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """All texts of a tree, with their keys."""
    if isinstance(tree, str):
        return [(prefix, tree)]
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in _texts(value, f"{prefix}.{key}".lstrip("."))]


def build_clients(cfg: DictConfig, accelerator: str = "cpu") -> Stacks:
    """Data, network, client parts and stores; nothing that the server's parts keep."""
    torch.set_float32_matmul_precision(cfg.get("precision_matmul") or "highest")
    parts = assemble(cfg, clients_only=True)
    stacks, module, data = parts.loop.stacks, parts.module, parts.data
    module.trainer = Trainer(
        accelerator=accelerator, devices=1, precision=cfg.precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(stacks.program.parts),
    )  # fmt: skip
    module.to(module.trainer.strategy.root_device)
    data.to_device(module.device, next(module.parameters()).dtype, module.memory_format)
    return stacks
