"""What a user may type: the groups of config files, their options, and the keys of a config."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gcfed.utils.resolvers import CONFIGS

GROUPS = sorted(
    path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()
)
#: Groups that a run may be without: they are null in ``configs/train.yaml``.
OPTIONAL_GROUPS = ("debug", "experiment", "hparams_search")


def options_of(group: str) -> list[str]:
    """The options of a group of this project."""
    return sorted(file.stem for file in CONFIGS.glob(f"{group}/*.yaml") if file.stem != "base")


def overrides_choosing(option: str) -> list[str]:
    """The overrides that choose an option of this name. ``cuda`` is another word for ``gpu``."""
    option = "gpu" if option == "cuda" else option
    return [f"{group}={option}" for group in GROUPS if option in options_of(group)]


def keys_to_type(cfg: DictConfig) -> list[str]:
    """The keys of a config and the groups, without keys that only repeat another one, as
    data.num_clients does.
    """
    tree = OmegaConf.to_container(cfg)
    keys = [key for key, value in values_of(tree) if not _repeats(key, value)]
    return [*(key for key in keys if not key.startswith("hydra.")), *GROUPS]


def _repeats(key: str, value: Any) -> bool:
    """Whether a key's value is that of another key with the same last part."""
    other = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
    return other is not None and other[1].split(".")[-1] == key.split(".")[-1]


def keys_of(tree: Any, prefix: str = "") -> list[str]:
    """All dotted keys of a tree."""
    return [key for key, _ in values_of(tree, prefix)]


def values_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted keys of a tree, and their values."""
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        yield from values_of(value, f"{prefix}{key}.")
