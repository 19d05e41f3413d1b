"""``~/`` in the paths of a config: the home folder, as a shell reads it."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

HOME = "~/"


def expand_home(node: DictConfig | ListConfig) -> None:
    """Replaces ``~/`` at the beginning of each text in a config, and in all below it.

    A shell replaces it only on the command line, and not in a YAML file.
    """
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    keys: Any = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        child: Any = node._get_node(key)  # an interpolation stays one
        if OmegaConf.is_config(child):
            expand_home(child)
            continue
        value = child._value()
        if isinstance(value, str) and value.startswith(HOME):
            child._set_value(f"{Path.home()}/{value.removeprefix(HOME)}")
