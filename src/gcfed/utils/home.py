"""``~/`` in the paths of a config: the home folder, as a shell reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

HOME = "~/"


def expand_home(cfg: DictConfig) -> None:
    """Replaces ``~/`` at the beginning of each text in a config, which may be that of a user's YAML
    file.
    """
    _expand_below(cfg)


def _expand_below(node: DictConfig | ListConfig) -> None:
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    keys: Any = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        child: Any = node._get_node(key)  # an interpolation stays one
        if OmegaConf.is_config(child):
            _expand_below(child)
            continue
        value = child._value()
        if isinstance(value, str) and value.startswith(HOME):
            child._set_value(f"{Path.home()}/{value.removeprefix(HOME)}")
