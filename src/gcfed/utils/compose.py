"""Reads the words of a command line, and composes a config from them as the commands do."""

import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig

from gcfed.utils.hints import (
    COMPOSING_ERRORS,
    bare_word,
    explained,
    unknown_option,
    with_dashes,
)
from gcfed.utils.home import expand_home
from gcfed.utils.idle import refuse_idle, why_without_effect
from gcfed.utils.keys import GROUPS, OPTIONAL_GROUPS, keys_to_type, options_of
from gcfed.utils.refusal import MissingFile, Refusal
from gcfed.utils.resolvers import CONFIGS, VERSION_BASE

TRAIN = CONFIGS / "train.yaml"
#: What a bare word after a command probably names → what to type.
OBJECTS = {
    "report": "name the folders of runs as in 'roots=[{}]'.",
    "eval": "name the checkpoint as in ckpt_path={}.",
}
SEARCH = re.compile(r"\+?(hparams_search|hydra/sweeper)=(?!\[\]$)")
SEARCHPATH = "hydra.searchpath"  # further folders of config files
#: A path in the home folder, alone, in quotes or in a list.
AT_HOME = re.compile(r"(^['\"]?|[\[,]\s*['\"]?)~/")
#: Keys of folders that commands write to.
FOLDER = re.compile(r"\+*(paths\.\w+|out|hydra\.(run|sweep)\.dir)")
#: What Hydra's grammar reads as no text, so it names no option.
NO_NAME = re.compile(r"true|false|[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
#: null as an option: alone, or as one of a sweep's.
NULL = re.compile(r"(^|[,(]\s*)null(?=\s*([,)]|$))", re.IGNORECASE)


def is_override(word: str) -> bool:
    """Whether a word of the command line is an override, such as ``seed=2`` or ``~callbacks``."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def refuse_words(typed: Sequence[str], path: Path) -> None:
    """Raises Refusal for words of the command line that are no overrides and no flags of Hydra.

    Args:
        typed: all words, in their order.
        path: the config file of the command.
    """
    flags = [word for word in typed if not is_override(word)]
    known, unknown = get_args_parser().parse_known_args(flags)
    for name, value in vars(known).items():
        if value == "":
            raise Refusal(f"--{name.replace('_', '-')} has no value.")
    if unknown:
        behind = flags[flags.index(unknown[0]) + 1 :]
        raise Refusal(with_dashes(unknown[0], behind, keys_to_type(_new_config((), path))))
    for word in known.overrides:
        before = typed[typed.index(word) - 1] if known.multirun else ""
        if is_override(before):
            raise Refusal(
                f"{word}: the values of a sweep are separated by commas, without spaces:"
                f" {before},{word}."
            )
        if path.stem in OBJECTS:
            raise Refusal(f"{word}: {OBJECTS[path.stem].format(word)}")
        raise Refusal(bare_word(word, keys_to_type(_new_config((), path))))


def shorthand(overrides: Iterable[str]) -> list[str]:
    """``model._target_=mynet.Net`` also chooses ``model=own``, and ``gc=null`` means ``gc=none``.

    A path and words such as ``it's`` and ``flöwers`` need no quotes. ``~/`` is the home folder,
    also behind an equals sign, where a shell leaves it as it is.

    Raises Refusal for a folder without a name: ``paths.log_dir=`` would be that of the root.
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
    if FOLDER.fullmatch(key) and not value.strip("'\" "):
        raise Refusal(f"{word} names no folder.")
    if key in GROUPS:
        value = _without_null(key, value)
    if key in GROUPS and NO_NAME.fullmatch(value):
        raise Refusal(unknown_option(key, value, options_of(key)))
    value = AT_HOME.sub(lambda found: f"{found[1]}{Path.home()}/", value)
    has_quote = re.match(r"[^'\"\[{(]+'", value)
    # plain text such as flöwers, and no list, sweep or function
    is_foreign = not value.isascii() and re.fullmatch(r"[^'\"\[\]{}(),$=]+", value)
    is_path = has_odd_letters(value) and os.path.exists(value)  # noqa: PTH110  (it may be long)
    if has_quote or is_foreign or is_path:
        return f"{key}={quoted(value)}"
    return f"{key}={value}"


def _without_null(group: str, options: str) -> str:
    """An option of a group, or those of a sweep, with what Hydra accepts in place of null: it
    accepts null itself in a list of defaults only.
    """
    if options.startswith("["):
        return options
    return NULL.sub(r"\1[]" if group in OPTIONAL_GROUPS else r"\1none", options)


def has_odd_letters(value: str) -> bool:
    """Whether a value has letters that Hydra's grammar knows only in quotes."""
    return re.search(r"[^\w./+@%-]", value, re.ASCII) is not None


def quoted(value: str | Path) -> str:
    """A text as one value of Hydra's grammar, whatever letters it has."""
    return QuotedString(str(value), Quote.single).with_quotes()


def searchpath(config_dir: str | Path, words: Iterable[str]) -> str:
    """The override with which Hydra also looks for files in a folder."""
    if not str(config_dir):
        raise Refusal("config_dir has no value: name a folder, as in --config-dir conf.")
    folder = Path(config_dir).expanduser().absolute()
    if not folder.is_dir():
        raise MissingFile(f"config_dir={config_dir}: there is no such folder.")
    if any(word.startswith(f"{SEARCHPATH}=") for word in words):
        raise Refusal(
            f"config_dir={config_dir} does not combine with {SEARCHPATH}: name all folders there."
        )
    return f"{SEARCHPATH}=[{quoted(f'file://{folder}')}]"


def composed(overrides: Sequence[str]) -> DictConfig:
    """A new config of ``configs/train.yaml``.

    Raises Refusal for a wrong override, with a suggestion, and for one without effect.

    The same choice of files is composed once. Values are set afterwards.
    """
    cfg = _composed(overrides)
    searches = any(map(SEARCH.match, overrides))
    refuse_idle(cfg, overrides, searches=searches)
    return cfg


def without_idle(overrides: Sequence[str], drawn: Sequence[str]) -> list[str]:
    """Those overrides that a trial has drawn which have an effect beside all others.

    All that cannot be composed are kept, so that the trial is refused.
    """
    try:
        cfg = _composed([*overrides, *drawn])
    except Refusal:
        return [*drawn]
    return [word for word in drawn if not why_without_effect(cfg, word)]


def _composed(overrides: Sequence[str]) -> DictConfig:
    """Raises Refusal for a wrong override, with a suggestion."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        values = [override for override in parsed if _is_value(override)]
        chosen = [str(override.input_line) for override in parsed if override not in values]
        cfg = _new_config(tuple(chosen))
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    except COMPOSING_ERRORS as error:
        raise Refusal(explained(error)) from None
    expand_home(cfg)
    return cfg


def _is_value(override: Override) -> bool:
    """Whether an override sets a value, and neither chooses a file nor sweeps."""
    key = override.key_or_group
    is_file = key in GROUPS or key == SEARCHPATH or "/" in key
    return not is_file and not override.is_sweep_override()


def _new_config(overrides: tuple[str, ...], path: Path = TRAIN) -> DictConfig:
    """A new config of a file with overrides.

    It is composed once, unless a user's own files take part, which may have changed.
    """
    if any(word.startswith(SEARCHPATH) for word in overrides):
        return _composed_by_hydra(overrides, path)
    cfg: DictConfig = pickle.loads(_pickled(overrides, path))  # faster than a deep copy
    return cfg


@cache
def _pickled(overrides: tuple[str, ...], path: Path) -> bytes:
    return pickle.dumps(_composed_by_hydra(overrides, path))


def _composed_by_hydra(overrides: tuple[str, ...], path: Path) -> DictConfig:
    with _initialized(path.parent):
        return compose(path.stem, overrides=list(overrides))


@contextmanager
def _initialized(folder: Path) -> Iterator[None]:
    """Hydra with the files of a folder, also within one of Hydra's commands."""
    hydra = GlobalHydra.instance()
    command = hydra.hydra
    hydra.hydra = None
    try:
        with initialize_config_dir(str(folder.resolve()), **VERSION_BASE):
            yield
    finally:
        hydra.hydra = command
