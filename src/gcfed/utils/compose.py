"""Overrides made into configs, as the commands do it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gcfed.utils.hints import GROUPS_OF_CONFIGS, explained
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


def composed(name: str, overrides: list[str]) -> DictConfig:
    """``configs/<name>.yaml`` with overrides, by Hydra; also within a command of its own.

    Raises:
        HydraException: what it has to say against an override.
    """
    hydra = GlobalHydra.instance()
    command, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return compose(name, overrides=overrides)
    finally:
        hydra.hydra = command


class Composer:
    """Composes overrides as Hydra would, once for each choice of config files, which is what takes Hydra long.

    Args:
        load: Hydra's own composition; that of ``configs/train.yaml``.
        groups: the folders of ``configs``: an override of one chooses a file, any other one sets a value.
    """

    def __init__(
        self, load: Callable[[list[str]], DictConfig] | None = None, groups: Collection[str] = GROUPS_OF_CONFIGS
    ) -> None:
        self.load, self.groups = load or (lambda overrides: composed("train", overrides)), groups
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The config, which is the caller's own.

        Raises:
            ValueError: what Hydra has to say against an override, and what was meant.
        """
        try:
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            values = [o for o in parsed if o.type.name == "CHANGE" and self._is_value(o.key_or_group)]
            if len(values) + sum(o.key_or_group in self.groups for o in parsed) < len(parsed):
                values = []  # with additions and deletions the order could matter
            files = tuple(str(o.input_line) for o in parsed if o not in values)
            if files not in self._composed:
                self._composed[files] = self.load(list(files))
            cfg = deepcopy(self._composed[files])
            for override in values:
                try:
                    OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
                except (ConfigKeyError, ConfigAttributeError):
                    raise ConfigCompositionException(f"Could not override '{override.key_or_group}'.") from None
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(explained(error, overrides, self.load)) from None
        return cfg

    def _is_value(self, key: str) -> bool:
        return key not in self.groups and not any(c in key for c in "/@:")
