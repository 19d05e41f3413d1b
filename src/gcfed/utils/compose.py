"""From overrides to a config, as the commands do it; and "did you mean …" for a word that Hydra does not know."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gcfed.utils.resolvers import CONFIGS

GROUPS_OF_CONFIGS = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir())
_KEY = re.compile(r"[^/@:]+")  # a key that is in no group


def shorthand(overrides: Iterable[str]) -> list[str]:
    """``model._target_=mynet.Net`` also chooses ``model=own``. The path of a checkpoint needs no quotes."""
    overrides = list(overrides)
    for i, (key, _, path) in enumerate(override.partition("=") for override in overrides):
        quoted = path[:1] in ("'", '"', "[")
        if key == "ckpt_path" and not quoted and (os.path.isfile(path) or "'" in path):  # noqa: PTH113  (is_file() may raise)
            overrides[i] = f"{key}={QuotedString(path, Quote.single).with_quotes()}"
    own = [o for o in overrides if o.startswith("model._target_=") and not o.startswith("model._target_=gcfed.")]
    if own and not any(o.startswith("model=") for o in overrides):
        overrides.insert(overrides.index(own[0]), "model=own")
    return overrides


def run_config(words: Sequence[str]) -> Path | None:
    """The ``config.yaml`` of the run to which ``ckpt_path=`` belongs; None if ``words`` choose a model or data."""
    parsed = OverridesParser.create().parse_overrides([word for word in words if word.startswith("ckpt_path=")])
    path = next((Path(str(override.value())) for override in parsed), None)
    if path is None or not path.is_file() or any(re.match(r"(model|data|experiment)=", word) for word in words):
        return None
    config = (path.parent.parent if path.parent.name == "checkpoints" else path.parent) / "config.yaml"
    if not config.is_file():
        raise ValueError(f"ckpt_path={path}: there is no {config}. Name the settings of its run: model=… data=… …")
    return config.resolve()


def composed(overrides: list[str], path: Path = CONFIGS / "train.yaml") -> DictConfig:
    """A config file with overrides, by Hydra; also within one of Hydra's commands."""
    hydra = GlobalHydra.instance()
    command, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base=None):
            return compose(path.stem, overrides=overrides)
    finally:
        hydra.hydra = command


class Composer:
    """Composes configs of ``configs/train.yaml``. Equal choices of config files are composed once: that takes long."""

    def __init__(self) -> None:
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The config, which belongs to the caller. Raises ValueError for a wrong override, and says what was meant."""
        try:
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            values = [o for o in parsed if o.type.name == "CHANGE" and _KEY.fullmatch(o.key_or_group)]
            values = [o for o in values if not (o.key_or_group in GROUPS_OF_CONFIGS or o.is_sweep_override())]
            if len(values) + sum(o.key_or_group in GROUPS_OF_CONFIGS for o in parsed) < len(parsed):
                values = []  # with additions and deletions the order could matter
            files = tuple(str(o.input_line) for o in parsed if o not in values)
            if files not in self._composed:
                self._composed[files] = composed(list(files))
            cfg = deepcopy(self._composed[files])
            for override in values:
                try:
                    OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
                except (ConfigKeyError, ConfigAttributeError):
                    raise ConfigCompositionException(f"Could not override '{override.key_or_group}'.") from None
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(explained(error, overrides)) from None
        return cfg


def explained(error: Exception, words: Sequence[str], path: Path = CONFIGS / "train.yaml") -> str:
    """What Hydra reports about the overrides ``words`` of a config file, in one line, with what was meant."""
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group:
        options = sorted(file.stem for file in CONFIGS.glob(f"{group}/*.yaml") if file.stem != "base")
        return f"{group}={option}: there is no such option{meant(option, options)} There are {', '.join(options)}."
    if unknown := re.search(r"Could not override '([^']+)'", str(error)):
        place, _, name = (key := unknown[1]).rpartition(".")
        nodes: dict[str, Any] = {f.name: OmegaConf.load(f) for f in CONFIGS.glob(f"{place or None}/*.yaml")}
        files = [file for file, node in nodes.items() if name in (node.get(place) or node)]
        if files:
            return f"{key}: the chosen {place} has no such key; it is one of configs/{place}/{' and '.join(files)}."
        chosen = [word for word in words if word.partition("=")[0] in GROUPS_OF_CONFIGS and "," not in word]
        known = [*_keys(OmegaConf.to_container(composed(chosen, path)))]
        hint = meant(key, [*known, *GROUPS_OF_CONFIGS])
        hint += f" +{key}=… passes it to what {place} builds." if hint == "." and f"{place}._target_" in known else ""
        return f"{key}: there is no such key{hint}"
    word = f"{error.override}: " if isinstance(error, OverrideParseException) else ""
    return word + " ".join(str(error).partition("\nSee https://")[0].split())


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


def meant(key: str, known: Iterable[str]) -> str:
    """``: did you mean client.optimizer.lr?``, or a full stop. Keys of the same group or depth go first."""
    names = {other: other.split(".")[-1] for other in known if other != key}
    (group, *rest), name = key.split("."), key.split(".")[-1]
    near = [name] if name in names.values() else get_close_matches(name, {*names.values()}, n=1)
    found = [other for other, last in names.items() if last in near]
    alike = [other for other in found if other.split(".")[0] == group]
    alike = alike or [other for other in found if other.count(".") == len(rest)] or found
    return f": did you mean {' or '.join(alike[:3])}?" if alike else "."
