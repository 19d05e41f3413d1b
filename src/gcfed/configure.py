"""The config of a run from Python, as in a notebook: ``train(configure("gc=none", folder="logs/mine"))``."""

import os
from collections.abc import Iterable
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, open_dict

import gcfed.runs.place  # noqa: F401  (its resolvers name the folders of runs)
from gcfed.utils.resolvers import CONFIGS


def shorthand(overrides: Iterable[str]) -> list[str]:
    """``model._target_=mynet.Net`` alone chooses ``model=own``, whose keys are not those of the default network.

    The path of a checkpoint needs no quotes for Hydra, whatever characters its folders' names have.
    """
    overrides = list(overrides)
    for i, (key, _, path) in enumerate(override.partition("=") for override in overrides):
        quoted = path[:1] in ("'", '"', "[")
        if key == "ckpt_path" and not quoted and (os.path.isfile(path) or "'" in path):  # noqa: PTH113  (is_file() may raise)
            overrides[i] = f"{key}={QuotedString(path, Quote.single).with_quotes()}"
    own = [o for o in overrides if o.startswith("model._target_=") and not o.startswith("model._target_=gcfed.")]
    if own and not any(o.startswith("model=") for o in overrides):
        overrides.insert(overrides.index(own[0]), "model=own")
    return overrides


def configure(*overrides: str, folder: str | Path) -> DictConfig:
    """What ``python src/train.py`` composes of these overrides, for a run that writes to ``folder``.

    The run draws no progress bar, which a notebook would keep line by line, and takes one process unless
    ``trainer.devices`` says otherwise: a notebook's kernel has threads, and a fork would copy their locks.

    Args:
        overrides: as on the command line, ``"client.epochs=1"``.
        folder: of the run; an earlier one there is overwritten.
    """
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", shorthand(overrides))
    with open_dict(cfg):
        cfg.paths.output_dir = str(folder)
        cfg.callbacks.progress = None
        if cfg.trainer.devices == "auto":
            cfg.trainer.devices = 1
    return cfg
