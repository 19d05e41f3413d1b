"""Composes a choice of a folder's config files, each of which is read once.

Hydra's ``compose`` reads all files anew and merges them node by node, which takes several times as
long. Here Hydra makes the list of files, and their contents are merged as plain dicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

Tree = dict[str, Any]


class ConfigFiles:
    """The files of Hydra's search path. They must not change."""

    def __init__(self, search_path: ConfigSearchPath) -> None:
        self._repository = CachingConfigRepository(ConfigRepository(search_path))
        self._contents: dict[str, Tree] = {}  # by the path of a file

    def compose(self, name: str, overrides: Sequence[str]) -> DictConfig:
        """What Hydra composes of a primary config and overrides.

        Raises what Hydra raises.
        """
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
        chosen = create_defaults_list(
            repo=self._repository,
            config_name=name,
            overrides_list=parsed,
            prepend_hydra=True,  # a file may choose a sweeper
            skip_missing=False,
        )
        tree: Tree = {}
        for default in chosen.defaults:
            _merge(tree, self._tree_of(default))
        tree.pop("hydra", None)
        cfg: DictConfig = OmegaConf.create(tree)
        OmegaConf.set_struct(cfg, True)
        ConfigLoaderImpl._apply_overrides_to_config(chosen.config_overrides, cfg)
        return cfg

    def _tree_of(self, default: ResultDefault) -> Tree:
        """The content of a file, below the keys of its package; none of Hydra's own files."""
        path = str(default.config_path)
        if path.startswith("hydra/"):
            return {}
        if path not in self._contents:
            loaded = self._repository.load_config(path)
            assert loaded is not None  # it is in the list of defaults
            content: Any = OmegaConf.to_container(loaded.config)
            self._contents[path] = content
        tree = self._contents[path]
        keys = default.package.split(".") if default.package else []
        for key in reversed(keys):
            tree = {key: tree}
        return tree


def _merge(tree: Tree, other: Tree) -> None:
    """Merges another tree into one, as OmegaConf does: its values win, and its dicts are copied."""
    for key, value in other.items():
        if not isinstance(value, dict):
            tree[key] = value
            continue
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        _merge(tree[key], value)
