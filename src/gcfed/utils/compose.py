"""Jobs' overrides made into configs: once for each choice of config files, which is what takes Hydra long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.utils.resolvers import CONFIGS


class Composer:
    """Composes overrides as Hydra would; jobs that differ in values alone share what was composed.

    Args:
        load: Hydra's own composition.
        groups: the folders of ``configs``: an override of one chooses a file, any other one sets a value.
    """

    def __init__(self, load: Callable[[list[str]], DictConfig], groups: Collection[str]) -> None:
        self.load, self.groups = load, groups
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The config, which is the caller's own.

        Raises:
            ValueError: what Hydra has to say against an override.
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
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(" ".join(str(error).split())) from None
        return cfg

    def _is_value(self, key: str) -> bool:
        return key not in self.groups and not any(c in key for c in "/@:")


def train_composer() -> Composer:
    """Of ``configs/train.yaml``, as ``python src/train.py`` reads it."""

    def load(overrides: list[str]) -> DictConfig:
        hydra = GlobalHydra.instance()
        command, hydra.hydra = hydra.hydra, None  # that of src/report.py, within which this composes
        try:
            with initialize_config_dir(str(CONFIGS), version_base="1.3"):
                return compose("train", overrides=overrides)
        finally:
            hydra.hydra = command

    return Composer(load, {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()})
