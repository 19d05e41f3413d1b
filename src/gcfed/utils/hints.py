"""What was meant by a word that Hydra does not know, said at the first try."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from gcfed.utils.resolvers import CONFIGS, how_to_install

if TYPE_CHECKING:
    from omegaconf import DictConfig

GROUPS_OF_CONFIGS = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir())
_NO_NAME = re.compile(r"(.*[\[,])?\s*(null|true|false|[-+.\d]+)\s*([\],].*)?", re.IGNORECASE)
_UNKNOWN = re.compile(r"Could not override '(?P<key>[^']+)'")


def check_groups(words: Iterable[str]) -> None:
    """Refuses ``gc=null`` and the like, of which Hydra only says that something must be a string.

    Raises:
        ValueError: names the word, the options and how to leave a group out.
    """
    for word in words:
        group, _, option = word.partition("=")
        if group in ("hydra.sweeper", "hydra.launcher"):
            raise ValueError(f"{word} must be a group of settings: choose one by {group.replace('.', '/')}=<name>.")
        if group in GROUPS_OF_CONFIGS and _NO_NAME.fullmatch(option):
            options = sorted(path.stem for path in CONFIGS.glob(f"{group}/*.yaml") if path.stem != "base")
            raise ValueError(f"{word} names no option of {group}: choose {', '.join(options)}, or ~{group} for none.")


def explained(error: Exception, words: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> str:
    """What Hydra has against the overrides ``words``, in one sentence, with what was meant.

    Args:
        error: Hydra's.
        words: the overrides that it was given.
        compose: composes overrides, for the keys that there are.
    """
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group:  # Hydra knows the options, and says them with its search path
        options = [name for name in getattr(error, "options", None) or () if name != "base"]
        extra = option.partition("_")[0]
        if group == "hydra/launcher" and extra in ("joblib", "submitit"):
            return f"{group}={option} needs a package: {how_to_install(extra)}"
        listed = ", ".join(options) or "none"
        return f"{group}={option} is unknown{meant(option, options) or '.'} There are {listed}."
    if unknown := _UNKNOWN.search(str(error)):
        key = unknown["key"]
        word = next((word for word in words if word.partition("=")[0] == key), key)
        keys = known_keys([other for other in words if other != word], compose)
        return f"{word} sets nothing{meant(key, [*keys, *GROUPS_OF_CONFIGS]) or f': there is no key {key}.'}"
    return " ".join(str(error).split())


def known_keys(words: list[str], compose: Callable[[list[str]], DictConfig]) -> list[str]:
    """All keys of the config that these overrides make; if they make none, of the default one."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    for overrides in (words, []):
        with suppress(HydraException, ValueError):
            return [*_keys(OmegaConf.to_container(compose(overrides)))]
    return []


def _keys(tree: Any, prefix: str = "") -> Iterable[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


def meant(key: str, known: Iterable[str]) -> str:
    """``: did you mean client.optimizer.lr?``, or nothing.

    Meant are keys that end in the same word, or else in the one that is most alike: rather those of the same group,
    or as deep.
    """
    by_name: dict[str, list[str]] = {}
    for other in dict.fromkeys(known):
        by_name.setdefault(other.split(".")[-1], []).append(other)
    name, group = key.split(".")[-1], key.split(".")[0]
    found = by_name.get(name) or [o for near in get_close_matches(name, by_name, n=1) for o in by_name[near]]
    ours = [other for other in found if other.split(".")[0] == group]
    found = ours or [other for other in found if other.count(".") == key.count(".")] or found
    return f": did you mean {' or '.join(found[:3])}?" if found else ""
