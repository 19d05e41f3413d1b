"""Composes a config from overrides, as the commands do, and suggests a word in place of an unknown one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.utils.resolvers import CONFIGS

TRAIN = CONFIGS / "train.yaml"
GROUPS = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir())


def shorthand(overrides: Iterable[str]) -> list[str]:
    """``model._target_=mynet.Net`` also chooses ``model=own``, and ``gc=null`` means ``gc=none``.

    A path and a word such as ``it's`` need no quotes.
    """
    words = list(overrides)
    for i, (key, _, value) in enumerate(word.partition("=") for word in words):
        odd = re.search(r"[^\w./+@%-]", value, re.ASCII)
        if (odd and os.path.exists(value)) or re.match(r"[^'\"\[{(]+'", value):  # noqa: PTH110  (lists may be too long)
            words[i] = f"{key}={QuotedString(value, Quote.single).with_quotes()}"
        elif value == "null" and key in GROUPS:
            words[i] = f"{key}=none"
    own = any(re.match(r"model\._target_=(?!gcfed\.)", word) for word in words)
    return ["model=own"] * (own and not any(word.startswith("model=") for word in words)) + words


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


def composed(overrides: Sequence[str]) -> DictConfig:
    """A new config of ``configs/train.yaml``. Raises ValueError for a wrong override, with a suggestion.

    Hydra composes the same choice of files once, because that takes 0.3 s. Values are set afterwards.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        groups = {o.key_or_group for o in parsed if o.key_or_group in GROUPS or "/" in o.key_or_group}
        values = [o for o in parsed if o.key_or_group not in groups and not o.is_sweep_override()]
        cfg = deepcopy(_by_hydra(tuple(str(o.input_line) for o in parsed if o not in values)))
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explained(error, overrides)) from None
    return cfg


@cache
def _by_hydra(overrides: tuple[str, ...], path: Path = TRAIN) -> DictConfig:
    """A config file with overrides, also within one of Hydra's commands."""
    hydra = GlobalHydra.instance()
    command, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base=None):
            return compose(path.stem, overrides=list(overrides))
    finally:
        hydra.hydra = command


def explained(error: Exception, words: Sequence[str], path: Path = TRAIN) -> str:
    """Hydra's message about the overrides ``words`` of a config file, in one line, with a suggestion."""
    if unknown := re.search(r"Could not override '([^']+)'", str(error)):
        chosen = [word for word in words if word.partition("=")[0] in GROUPS and "," not in word]
        keys = [*_keys(OmegaConf.to_container(_by_hydra(tuple(chosen), path))), *GROUPS]
        return f"{unknown[1]}: there is no such key{suggestion(unknown[1], keys)}"
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group:
        known = sorted(file.stem for file in CONFIGS.glob(f"{group}/*.yaml") if file.stem != "base")
        hint = suggestion(option, known, f"{group}=")
        return f"{group}={option}: there is no such option{hint} There are {', '.join(known)}."
    message, word = " ".join(str(error).partition("\nSee https://")[0].split()), getattr(error, "override", None)
    return f"{word}: {message}" if word else message


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


def suggestion(word: str, known: Iterable[str], before: str = "") -> str:
    """``: did you mean client.optimizer.lr?``, or a full stop. Keys of the same group or depth go first."""
    names = {other: other.split(".")[-1] for other in known}
    near = get_close_matches(word.split(".")[-1], {*names.values()}, n=1, cutoff=0.7)
    found = [other for other, name in names.items() if name in near or (not near and f"_{word}_" in f"_{name}_")]
    alike = [other for other in found if other.split(".")[0] == word.split(".")[0]]
    alike = alike or [other for other in found if other.count(".") == word.count(".")] or found
    return f": did you mean {' or '.join(before + other for other in alike[:3])}?" if alike else "."
