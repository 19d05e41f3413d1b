"""Composes a config from overrides, as the commands do, and suggests a word in place of an unknown
one.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.utils.resolvers import CONFIGS

TRAIN = CONFIGS / "train.yaml"
SEARCHPATH = "hydra.searchpath"  # further folders of config files
PLACES = ("data.path", "data.root", "data.name")  # each names where the user's own data are
GROUPS = sorted(
    path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()
)


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


def composed(overrides: Sequence[str]) -> DictConfig:
    """A new config of ``configs/train.yaml``.

    Raises ValueError for a wrong override, with a suggestion.

    Hydra composes the same choice of files once, because that takes 0.3 s. Values are set
    afterwards.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        groups = {
            o.key_or_group for o in parsed if o.key_or_group in GROUPS or "/" in o.key_or_group
        } | {SEARCHPATH}
        values = [o for o in parsed if o.key_or_group not in groups and not o.is_sweep_override()]
        cfg = deepcopy(_by_hydra(tuple(str(o.input_line) for o in parsed if o not in values)))
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explained(error, overrides)) from None
    return cfg


def _by_hydra(overrides: tuple[str, ...], path: Path = TRAIN) -> DictConfig:
    """A config file with overrides, composed once unless a user's own files take part, which may
    have changed.
    """
    if any(word.startswith(SEARCHPATH) for word in overrides):
        return _composed_anew(overrides, path)
    return _composed_once(overrides, path)


def _composed_anew(overrides: tuple[str, ...], path: Path) -> DictConfig:
    """A config file with overrides, also within one of Hydra's commands."""
    hydra = GlobalHydra.instance()
    command, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base=None):
            return compose(path.stem, overrides=list(overrides))
    finally:
        hydra.hydra = command


_composed_once = cache(_composed_anew)


def explained(error: Exception, words: Sequence[str], path: Path = TRAIN) -> str:
    """Hydra's message about the overrides ``words`` of a config file, in one line, with a
    suggestion.
    """
    if unknown := re.search(r"Could not override '([^']+)'", str(error)):
        group = (key := unknown[1]).partition(".")[0].replace("methods", "algorithm")
        files = sorted(
            file
            for file in CONFIGS.glob(f"{group}/*.yaml")
            if file.stem != "base" and _has(file, key)
        )
        places = [other for other in PLACES if key in PLACES and other in _known(words, path)]
        if places:
            return f"{key}: there is no such key: did you mean {places[0]}?"
        if files and group != "hydra":
            return (
                f"{key}: there is no such key without"
                f" {' or '.join(f'{group}={file.stem}' for file in files)}."
            )
        return f"{key}: there is no such key{suggestion(key, _known(words, path))}"
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group:
        known = sorted(file.stem for file in CONFIGS.glob(f"{group}/*.yaml") if file.stem != "base")
        meant = suggestion(option, known, f"{group}=")
        return f"{group}={option}: there is no such option{meant} There are {', '.join(known)}."
    message, word = (
        " ".join(str(error).partition("\nSee https://")[0].split()),
        getattr(error, "override", None),
    )
    if word and "/" in (value := word.partition("=")[2]):  # as a shell takes it
        quoted = QuotedString(value, Quote.double).with_quotes()
        message += f" A path needs quotes: {shlex.quote(word.partition('=')[0] + '=' + quoted)}"
    return f"{word}: {message}" if word else message


def undashed(flags: list[str], words: Sequence[str], path: Path) -> str:
    """What to type in place of ``--epochs 3``; "" if Hydra knows all flags."""
    for flag in get_args_parser().parse_known_args(flags)[1]:
        key, _, value = flag.lstrip("-").partition("=")
        value = value or "".join(flags[flags.index(flag) + 1 :][:1])
        meant = suggestion(key.replace("-", "_"), _known(words, path), after=f"={value}")
        return f"{flag}: a setting has no dashes{meant}"
    return ""


def _known(words: Sequence[str], path: Path) -> list[str]:
    """The keys of a config with the options that ``words`` choose, and the groups."""
    chosen = [word for word in words if word.partition("=")[0] in GROUPS and "," not in word]
    return [*_keys(OmegaConf.to_container(_by_hydra(tuple(chosen), path))), *GROUPS]


def _has(file: Path, key: str) -> bool:
    """Whether an option, or one of the same group in its defaults, sets the key."""
    node: Any = OmegaConf.to_container(OmegaConf.load(file))
    defaults = (
        file.with_name(f"{name}.yaml") for name in node.get("defaults", ()) if isinstance(name, str)
    )
    # a file may begin at the root, or in its group
    own = [*_keys(node), *_keys(node, f"{file.parent.name}.")]
    return key in own or any(_has(other, key) for other in defaults if other.is_file())


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


def suggestion(word: str, known: Iterable[str], before: str = "", after: str = "") -> str:
    """``: did you mean client.optimizer.lr?``, or a full stop.

    Keys of the same group or depth go first.
    """
    names = {other: other.split(".")[-1] for other in known}
    near = get_close_matches(word.split(".")[-1], {*names.values()}, n=1, cutoff=0.7)
    found = [
        other
        for other, name in names.items()
        if name in near or (not near and f"_{word}_" in f"_{name}_")
    ]
    alike = [other for other in found if other.split(".")[0] == word.split(".")[0]]
    alike = alike or [other for other in found if other.count(".") == word.count(".")] or found
    return (
        f": did you mean {' or '.join(before + other + after for other in alike[:3])}?"
        if alike
        else "."
    )
