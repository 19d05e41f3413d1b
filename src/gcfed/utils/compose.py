"""Overrides made into configs, as the commands do it, and what was meant by a word that Hydra does not know."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gcfed.utils.resolvers import CONFIGS, how_to_install

Compose = Callable[[list[str]], DictConfig]
GROUPS_OF_CONFIGS = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir())
_KEY = re.compile(r"[^/@:]+")  # of no group
_UNKNOWN = re.compile(r"Could not override '(?P<key>[^']+)'")
_SWEEP = re.compile(r"((?P<commas>Ambiguous value for argument)|Sweep parameters) '(?P<word>.*)'")


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


def run_config(words: Sequence[str]) -> Path | None:
    """The ``config.yaml`` of the run in whose folder the file ``ckpt_path=`` lies; None where ``words`` choose what its
    model and its data are.

    Raises:
        ValueError: neither is there.
    """
    groups = {word.partition("=")[0] for word in words} & {*GROUPS_OF_CONFIGS}
    if groups & {"model", "data", "experiment"}:
        return None
    parsed = OverridesParser.create().parse_overrides([word for word in words if word.startswith("ckpt_path=")])
    path = next((Path(str(override.value())) for override in parsed), None)
    if path is None or not path.is_file():
        return None  # which is said later
    config = (path.parent.parent if path.parent.name == "checkpoints" else path.parent) / "config.yaml"
    if not config.is_file():
        raise ValueError(f"ckpt_path={path}: there is no {config}. Name the settings of its run: model=… data=… …")
    if groups:
        group = min(groups)
        raise ValueError(f"{group}=… chooses an option, and {config} has its settings: set {group}.<key>=<value>.")
    return config.resolve()


def composed(path: Path, overrides: list[str]) -> DictConfig:
    """A config file with overrides, by Hydra; also within a command of its own.

    Raises:
        HydraException: what it has to say against an override.
    """
    hydra = GlobalHydra.instance()
    command, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
            return compose(path.stem, overrides=overrides)
    finally:
        hydra.hydra = command


class Composer:
    """Composes overrides as Hydra would, once for each choice of config files, which is what takes Hydra long.

    Args:
        load: Hydra's own composition; that of ``configs/train.yaml``.
        groups: the folders of ``configs``: an override of one chooses a file, any other one sets a value.
    """

    def __init__(self, load: Compose | None = None, groups: Collection[str] = GROUPS_OF_CONFIGS) -> None:
        self.load, self.groups = load or partial(composed, CONFIGS / "train.yaml"), groups
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The config, which is the caller's own.

        Raises:
            ValueError: what Hydra has to say against an override, and what was meant.
        """
        check_groups(overrides)
        try:
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            values = [o for o in parsed if o.type.name == "CHANGE" and _KEY.fullmatch(o.key_or_group)]
            values = [o for o in values if not (o.key_or_group in self.groups or o.is_sweep_override())]
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


def check_groups(words: Iterable[str]) -> None:
    """Refuses ``gc=null``, ``metrics=[nan]`` and whatever else names no option: Hydra takes strings alone.

    Raises:
        ValueError: names the word, the options and how to leave a group out.
    """
    for word in words:
        group = word.partition("=")[0]
        if group in ("hydra.sweeper", "hydra.launcher"):
            raise ValueError(f"{word} must be a group of settings: choose one by {group.replace('.', '/')}=<name>.")
        if group in GROUPS_OF_CONFIGS and not _is_name(word):
            options = ", ".join(options_of(group))
            raise ValueError(f"{word} names no option of {group}: choose {options}, or ~{group} for none.")


def check_sweeps(words: Iterable[str]) -> None:
    """Refuses a sweep that has a value twice: both jobs would be the same run, in one folder.

    Raises:
        ValueError: names the word.
    """
    with suppress(OverrideParseException):  # Hydra explains it later
        for override in OverridesParser.create().parse_overrides([w for w in words if not w.startswith("-")]):
            values = [*override.sweep_string_iterator()] if override.is_discrete_sweep() else []
            if len({*values}) < len(values):
                raise ValueError(f"{override.input_line} has a value twice: that would be the same run in one folder.")


def _is_name(word: str) -> bool:
    """Whether an override of a group gives a name, or several."""
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return True  # Hydra says what is wrong
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    names = [name for each in values for name in (each if isinstance(each, list) else [each])]
    return all(isinstance(name, str | QuotedString) for name in names)


def options_of(group: str) -> list[str]:
    """What we ship of a group; Hydra names no options where one word of a list is unknown."""
    return sorted(path.stem for path in CONFIGS.glob(f"{group}/*.yaml") if path.stem != "base")


def explained(error: Exception, words: Sequence[str], compose: Compose) -> str:
    """What Hydra has against the overrides ``words``, in one sentence, with what was meant.

    ``compose`` makes configs of overrides, for the keys that there are.
    """
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group:  # Hydra knows the options, and says them with its search path
        options = [name for name in getattr(error, "options", None) or options_of(group) if name != "base"]
        extra = option.partition("_")[0]
        if group == "hydra/launcher" and extra in ("joblib", "submitit"):
            return f"{group}={option} needs a package: {how_to_install(extra)}"
        listed = ", ".join(options) or "none"
        return f"{group}={option} is unknown{meant(option, options) or '.'} There are {listed}."
    if unknown := _UNKNOWN.search(str(error)):
        key = unknown["key"]
        word = next((word for word in words if word.partition("=")[0] == key), key)
        keys = _known(compose, [other for other in words if other != word])
        group = key.partition(".")[0]
        place, _, name = key.rpartition(".")
        files = sorted((CONFIGS / place).glob("*.yaml")) if place in GROUPS_OF_CONFIGS else []
        if others := [path.stem for path in files if name in OmegaConf.load(path)]:
            return f"{word} sets nothing: it is a setting of {place}={' or '.join(others)}."
        hint = meant(key, [*keys, *GROUPS_OF_CONFIGS])
        if f"{place}._target_" in keys and f" {group}." not in hint:  # what is the user's own may take anything
            return f"{word} sets nothing: +{word} gives it to what {place} builds."
        return f"{word} sets nothing{hint or f': there is no key {key}.'}"
    if isinstance(error, OverrideParseException) and "=" not in (word := error.override):
        keys = _known(compose)
        path = "/" in word or word.endswith(".ckpt")
        file = "ckpt_path" if "ckpt_path" in keys else "roots"
        key = file if path else word if word in (*keys, *GROUPS_OF_CONFIGS) else "<key>"
        return f"{word} is no setting: write {key}={word if path else '<value>'}, one word without spaces."
    if sweep := _SWEEP.match(str(error)):
        key, _, values = (word := sweep["word"]).partition("=")
        return f"{word} is a sweep: add -m" + (f"; a list is '{key}=[{values}]'." if sweep["commas"] else ".")
    return " ".join(str(error).partition("\nSee https://")[0].split())


def _known(compose: Compose, words: Sequence[str] = ()) -> list[str]:
    """The keys that there are under the overrides, or else in the default config."""
    for overrides in ([*words], []):
        with suppress(HydraException, ValueError):
            return [key for key, _ in walk(OmegaConf.to_container(compose(overrides)))]
    return []


def walk(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All that a tree holds, with its dotted key: also its branches, and what is in lists."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, value in items:
        yield f"{prefix}{key}", value
        yield from walk(value, f"{prefix}{key}.")


def meant(key: str, known: Iterable[str]) -> str:
    """``: did you mean client.optimizer.lr?``, or nothing.

    Meant are keys that end in the same word, or else in the one that is most alike: rather those of the same group,
    or as deep. What was typed is not what was meant.
    """
    by_name: dict[str, list[str]] = {}
    for other in dict.fromkeys(other for other in known if other != key):
        by_name.setdefault(other.split(".")[-1], []).append(other)
    name, group = key.split(".")[-1], key.split(".")[0]
    found = by_name.get(name) or [o for near in get_close_matches(name, by_name, n=1) for o in by_name[near]]
    ours = [other for other in found if other.split(".")[0] == group]
    found = ours or [other for other in found if other.count(".") == key.count(".")] or found
    return f": did you mean {' or '.join(found[:3])}?" if found else ""
