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

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.utils.refusal import MissingFile, Refusal, message_of
from gcfed.utils.resolvers import CONFIGS, VERSION_BASE

TRAIN = CONFIGS / "train.yaml"
SEARCHPATH = "hydra.searchpath"  # further folders of config files
#: Keys that mean the same of different data sets, and other words for them.
SYNONYMS = (
    ("data.path", "data.root", "data.name", "data.dir", "data.file", "data.folder"),
    ("data.target", "data.label", "data.labels", "data.y"),
    ("data.size", "data.image_size", "data.resize"),
    ("data.sep", "data.separator", "data.delimiter"),
)
GROUPS = sorted(
    path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()
)

#: Groups of one object, which the option none switches off.
SWITCHES = ("attack", "federation", "gc", "privacy", "quantization")
#: What Hydra raises for a wrong override, or for a user's own file that is no YAML.
COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
#: Other projects' words for options of ours.
WORDS_FOR_OPTIONS = {"cuda": "gpu", "cuda:0": "gpu", "sgdm": "sgd"}


def shorthand(overrides: Iterable[str]) -> list[str]:
    """``model._target_=mynet.Net`` also chooses ``model=own``, and ``gc=null`` means ``gc=none``.

    A path and a word such as ``it's`` need no quotes.
    """
    words = [_without_shorthand(word) for word in overrides]
    names_own_network = any(re.match(r"model\._target_=(?!gcfed\.)", word) for word in words)
    if names_own_network and not any(word.startswith("model=") for word in words):
        return ["model=own", *words]
    return words


def _without_shorthand(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        return word
    if value == "null" and key in GROUPS:
        return f"{key}=none"
    has_quote = re.match(r"[^'\"\[{(]+'", value)
    if has_quote or _is_path_with_odd_letters(value):
        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    return word


def _is_path_with_odd_letters(value: str) -> bool:
    """Whether Hydra's grammar would stumble over a path that exists."""
    if re.search(r"[^\w./+@%-]", value, re.ASCII) is None:
        return False
    return os.path.exists(value)  # noqa: PTH110  (a list may be too long for a path)


def searchpath(config_dir: str | Path, words: Iterable[str]) -> str:
    """The override with which Hydra also looks for files in a folder."""
    folder = Path(config_dir).absolute()
    if not folder.is_dir():
        raise MissingFile(f"config_dir={config_dir}: there is no such folder.")
    if any(word.startswith(f"{SEARCHPATH}=") for word in words):
        raise Refusal(
            f"config_dir={config_dir} does not combine with {SEARCHPATH}: name all folders there."
        )
    return _searching([folder])


def _searching(folders: Iterable[Path]) -> str:
    quoted = [QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in folders]
    return f"{SEARCHPATH}=[{','.join(quoted)}]"


def with_config_dir(overrides: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The overrides with the folder of ``--config-dir`` among Hydra's search paths, for hints."""
    named = get_args_parser().parse_known_args(list(flags))[0].config_dir
    if named is None:
        return list(overrides)
    folders = [*_own_folders(overrides), Path(named).absolute()]
    rest = [word for word in overrides if not word.startswith(f"{SEARCHPATH}=")]
    return [_searching(folders), *rest]


def _own_folders(words: Iterable[str]) -> list[Path]:
    """The user's folders of config files."""
    searching = [word for word in words if word.startswith(f"{SEARCHPATH}=")]
    folders: list[Path] = []
    for override in OverridesParser.create().parse_overrides(searching):
        places: Any = override.value()
        for place in places or ():
            folders.append(Path(str(place).removeprefix("file://")))
    return folders


def composed(overrides: Sequence[str]) -> DictConfig:
    """A new config of ``configs/train.yaml``.

    Raises Refusal for a wrong override, with a suggestion, and for one without effect.

    Hydra composes the same choice of files once, because that takes 0.3 s. Values are set
    afterwards.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        values = [override for override in parsed if _is_value(override)]
        chosen = [str(override.input_line) for override in parsed if override not in values]
        cfg = deepcopy(_by_hydra(tuple(chosen)))
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    except COMPOSING_ERRORS as error:
        raise Refusal(explained(error, overrides)) from None
    refuse_idle(cfg, overrides)
    return cfg


def refuse_idle(cfg: DictConfig, words: Sequence[str]) -> None:
    """Raises Refusal if the user set a key of a group that is switched off: ``gc.boundary`` without
    GC.

    A config file may set such a key, as models do for the case that there is GC.
    """
    for word in words:
        key, _, value = word.removeprefix("++").partition("=")
        group = key.partition(".")[0]
        if group not in SWITCHES or group == key:
            continue
        node = cfg.get(group)
        if OmegaConf.is_dict(node) and not node.get("_target_"):
            options = [f"{group}={option}" for option in _options(group, words)]
            options.remove(f"{group}=none")
            raise Refusal(f"{key}={value} has no effect without {' or '.join(options)}.")


def _is_value(override: Override) -> bool:
    """Whether an override sets a value, and neither chooses a file nor sweeps."""
    key = override.key_or_group
    is_file = key in GROUPS or key == SEARCHPATH or "/" in key
    return not is_file and not override.is_sweep_override()


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
    command = hydra.hydra
    hydra.hydra = None
    try:
        with initialize_config_dir(str(path.parent.resolve()), **VERSION_BASE):
            return compose(path.stem, overrides=list(overrides))
    finally:
        hydra.hydra = command


_composed_once = cache(_composed_anew)


def explained(error: Exception, words: Sequence[str], path: Path = TRAIN) -> str:
    """The message of one of COMPOSING_ERRORS about the overrides ``words`` of a config file, in
    one line, with a suggestion.
    """
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown is not None:
        return _unknown_key(unknown[1], words, path)
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group:
        return _unknown_option(group, option, words)
    word: str | None = getattr(error, "override", None)
    message = message_of(str(error).partition("\nSee https://")[0])
    if word is None:
        return message
    return f"{word}: {message}{_quotes_for(word)}"


def _unknown_key(key: str, words: Sequence[str], path: Path) -> str:
    for keys in SYNONYMS:
        if key in keys:
            known = _known(words, path)
            meant = [other for other in keys if other in known]
            if meant:
                return f"{key}: there is no such key: did you mean {meant[0]}?"
    if _could_be_added(key, words):
        return f"{key}: there is no such key: did you mean +{key}?"
    group = key.partition(".")[0].replace("methods", "algorithm")
    if group != "hydra":
        options = _options(group, words)
        having = [f"{group}={option}" for option in options if _sets(group, option, key, words)]
        if having:
            return f"{key}: there is no such key without {' or '.join(having)}."
    value = next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), "")
    choices = _choosing(WORDS_FOR_OPTIONS.get(value, value), words) if "." not in key else []
    if choices:
        return f"{key}: there is no such key: did you mean {' or '.join(choices)}?"
    return f"{key}: there is no such key{suggestion(key, _known(words, path))}"


def _could_be_added(key: str, words: Sequence[str]) -> bool:
    """Whether a key is the ``_target_`` of a further method, metric or callback, or an argument of
    a class that the user named.
    """
    node, _, name = key.rpartition(".")
    if name == "_target_":
        return node.partition(".")[0] in ("callbacks", "logger", "methods", "metrics")
    return any(word.lstrip("+").startswith(f"{node}._target_=") for word in words)


def _unknown_option(group: str, option: str, words: Sequence[str]) -> str:
    known = _options(group, words)
    if option == "none":
        keys = [f"{group}.{key}" for key in _keys_of_default(group)]
        rest = f" Set its keys instead: {', '.join(keys[:4])}." if keys else ""
        return f"{group}=null: {group} cannot be left out. There are {', '.join(known)}.{rest}"
    for file in Path.cwd().glob(f"*/{group}/{option}.yaml"):
        folder = file.relative_to(Path.cwd()).parts[0]
        return (
            f"{group}={option}: there is no such option without {folder}/{group}/{option}.yaml: add"
            f" --config-dir {folder} (in Python config_dir='{folder}')."
        )
    meant = suggestion(option, known, f"{group}=")
    return f"{group}={option}: there is no such option{meant} There are {', '.join(known)}."


def _quotes_for(word: str) -> str:
    """How to type a path that Hydra's grammar does not accept; "" for a word without a path."""
    key, _, value = word.partition("=")
    if "/" not in value:
        return ""
    quoted = QuotedString(value, Quote.double).with_quotes()
    return f" A path needs quotes: {shlex.quote(f'{key}={quoted}')}"  # as a shell takes it


def _options(group: str, words: Iterable[str]) -> list[str]:
    """The options of a group, also those in the user's folders that ``words`` name."""
    stems: set[str] = set()
    for folder in (CONFIGS, *_own_folders(words)):
        stems |= {file.stem for file in folder.glob(f"{group}/*.yaml")}
    return sorted(stems - {"base"})


def _choosing(option: str, words: Iterable[str]) -> list[str]:
    """The overrides that choose an option of this name."""
    if not option or option == "none":
        return []
    return [f"{group}={option}" for group in GROUPS if option in _options(group, words)]


def _keys_of_default(group: str) -> list[str]:
    """The keys of a group that has one option, ``default``."""
    file = CONFIGS / group / "default.yaml"
    if not file.is_file():
        return []
    return [str(key) for key in OmegaConf.load(file) if key != "defaults"]


def is_override(word: str) -> bool:
    """Whether a word of the command line is an override, such as ``seed=2`` or ``~callbacks``."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def refuse_words(typed: Sequence[str], overrides: Sequence[str], path: Path) -> None:
    """Raises Refusal for words of the command line that are no overrides and no flags of Hydra.

    Args:
        typed: all words, in their order.
        overrides: those that Hydra gets.
        path: the config file of the command.
    """
    flags = [word for word in typed if not is_override(word)]
    known, unknown = get_args_parser().parse_known_args(flags)
    if unknown:
        raise Refusal(_dashed(unknown[0], flags, overrides, path))
    for word in known.overrides:
        before = typed[typed.index(word) - 1] if known.multirun else ""
        raise Refusal(_bare(word, before, overrides, path))


def _dashed(flag: str, flags: Sequence[str], words: Sequence[str], path: Path) -> str:
    """What to type in place of ``--epochs 3``."""
    key, _, value = flag.lstrip("-").partition("=")
    if not value:
        value = "".join(flags[flags.index(flag) + 1 :][:1])
    meant = suggestion(key.replace("-", "_"), _known(words, path), after=f"={value}")
    return f"{flag}: a setting has no dashes{meant}"


def _bare(word: str, before: str, words: Sequence[str], path: Path) -> str:
    """What to type in place of a word without ``=``; ``before`` stands before it in a sweep."""
    if path.stem == "report":
        return f"{word}: name the folders of runs as in 'roots=[{word}]'."
    if path.stem == "eval":
        return f"{word}: name the checkpoint as in ckpt_path={word}."
    if is_override(before):
        return (
            f"{word}: the values of a sweep are separated by commas, without spaces:"
            f" {before},{word}."
        )
    choices = _choosing(word, words)
    if choices:
        return f"{word}: did you mean {' or '.join(choices)}?"
    known = _known(words, path)
    if word in known:
        return f"{word}: a setting has a value, as in {word}=…; --help shows all settings."
    meant = suggestion(word, known, after="=…").replace(": did", " Did")
    return f"{word}: a setting is written key=value; --help shows all settings.{meant.strip('.')}"


def _known(words: Sequence[str], path: Path) -> list[str]:
    """The keys of a config with the options that ``words`` choose, and the groups.

    A key that only repeats another one, as data.num_clients does, is left out.
    """
    chosen = []
    for word in words:
        is_option = word.partition("=")[0] in GROUPS and "," not in word
        if is_option or word.startswith(f"{SEARCHPATH}="):
            chosen.append(word)
    tree = OmegaConf.to_container(_by_hydra(tuple(chosen), path))
    keys = dict(_values(tree))
    repeating = {key for key, value in keys.items() if _repeats(key, value)}
    return [*(key for key in keys if key not in repeating), *GROUPS]


def _repeats(key: str, value: Any) -> bool:
    """Whether a key's value is that of another key with the same last part."""
    other = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
    return other is not None and other[1].split(".")[-1] == key.split(".")[-1]


def _sets(group: str, option: str, key: str, words: Sequence[str]) -> bool:
    """Whether an option, or one of the same group in its defaults, sets the key."""
    places = [folder / group / f"{option}.yaml" for folder in (CONFIGS, *_own_folders(words))]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return False
    node: Any = OmegaConf.to_container(OmegaConf.load(file))
    # a file may begin at the root, or in its group
    if key in {*keys_of(node), *keys_of(node, f"{group}.")}:
        return True
    others = [name for name in node.get("defaults", ()) if isinstance(name, str)]
    return any(_sets(group, other, key, words) for other in others if other != "_self_")


def keys_of(tree: Any, prefix: str = "") -> list[str]:
    """All dotted keys of a tree."""
    return [key for key, _ in _values(tree, prefix)]


def _values(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted keys of a tree, and their values."""
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        yield from _values(value, f"{prefix}{key}.")


def suggestion(word: str, known: Iterable[str], before: str = "", after: str = "") -> str:
    """``: did you mean client.optimizer.lr?``, or a full stop.

    Keys of the same group or depth go first.
    """
    names = {other: other.split(".")[-1] for other in known}
    near = get_close_matches(word.split(".")[-1], {*names.values()}, n=1, cutoff=0.7)
    if near:
        alike = [other for other, name in names.items() if name in near]
    else:
        alike = [other for other, name in names.items() if f"_{word}_" in f"_{name}_"]
    if not alike:
        return "."
    group = word.split(".")[0]
    depth = word.count(".")
    in_group = [other for other in alike if other.split(".")[0] == group]
    as_deep = [other for other in alike if other.count(".") == depth]
    best = in_group or as_deep or alike
    return f": did you mean {' or '.join(before + other + after for other in best[:3])}?"
