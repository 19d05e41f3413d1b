"""Composes a config from overrides, as the commands do, and suggests a word in place of an unknown
one.
"""

import logging
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.utils.home import expand_home
from gcfed.utils.near import closest, did_you_mean
from gcfed.utils.refusal import MissingFile, Refusal, message_of
from gcfed.utils.resolvers import CONFIGS

log = logging.getLogger(__name__)
TRAIN = CONFIGS / "train.yaml"
SEARCHED = "optimized_metric"  # the measure of a search
SEARCH = re.compile(r"\+?(hparams_search|hydra/sweeper)=(?!\[\]$)")
SEARCHPATH = "hydra.searchpath"  # further folders of config files
GROUPS = sorted(
    path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()
)

#: Groups of one object, which the option none switches off.
SWITCHES = ("attack", "federation", "gc", "privacy", "quantization")
#: Keys that have no effect with certain values of another key → that key and these values.
IDLE = {
    r"gc\.(lam|boundary|local_rounds)": ("gc.local", (False,)),
    r"gc\.server_boundary": ("gc.server", (False,)),
    r"participation\.clock\.day": ("participation.clock.available", (None,)),
    r"participation\.sampler\.penalty": ("participation.sampler.preferred", (None,)),
    r"methods\.fedbuff\.a": ("methods.fedbuff.weight", ("constant",)),
    r"methods\.fedbuff\.b": ("methods.fedbuff.weight", ("constant", "polynomial")),
    r"methods\.fedasync\.a": ("methods.fedasync.weight", ("constant",)),
    r"methods\.fedasync\.b": ("methods.fedasync.weight", ("constant", "polynomial")),
    r"methods\.fedreg\.eta_s": ("methods.fedreg.pseudo", (False,)),
    r"methods\.fedreg\.eta_p": ("methods.fedreg.perturbed", (False,)),
}
#: Groups that a run may be without: they are null in ``configs/train.yaml``.
OPTIONAL_GROUPS = ("debug", "experiment", "hparams_search")
#: Groups that may use a class or function of the user's own → the words that name it.
TARGETS = {
    "aggregator": "aggregator._target_",
    "algorithm": "+methods.mine._target_",
    "data": "data=own data.dataset._target_",
    "metrics": "+metrics.mine._target_",
    "model": "model._target_",
    "partition": "partition=iid partition._target_",
}
#: A path in the home folder, alone, in quotes or in a list.
AT_HOME = re.compile(r"(^['\"]?|[\[,]\s*['\"]?)~/")
#: Keys of folders that commands write to.
FOLDER = re.compile(r"\+*(paths\.\w+|out|hydra\.(run|sweep)\.dir)")
#: ``mynet.Net``
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
#: What Hydra's grammar reads as no text, so it names no option.
NO_NAME = re.compile(r"true|false|[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
#: null as an option: alone, or as one of a sweep's.
NULL = re.compile(r"(^|[,(]\s*)null(?=\s*([,)]|$))", re.IGNORECASE)
#: What Hydra raises for a wrong override, or for a user's own file that is no YAML.
COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


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
        raise Refusal(_unknown_option(key, value, _options(key)))
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


def quoted(value: str | Path) -> str:
    """A text as one value of Hydra's grammar, whatever letters it has."""
    return QuotedString(str(value), Quote.single).with_quotes()


def has_odd_letters(value: str) -> bool:
    """Whether a value has letters that Hydra's grammar knows only in quotes."""
    return re.search(r"[^\w./+@%-]", value, re.ASCII) is not None


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
    return [word for word in drawn if not _why_without_effect(cfg, word)]


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


def refuse_idle(cfg: DictConfig, words: Sequence[str], *, searches: bool) -> None:
    """Raises Refusal if the user set a key of a group that is switched off: ``gc.boundary`` without
    GC; a key that has no effect with the present value of another one (:data:`IDLE`); or
    ``optimized_metric`` without a search.

    A config file may set such a key, as models do for the case that there is GC.
    """
    if not searches:
        refuse_measure_of_search(words)
    for word in words:
        why = _why_without_effect(cfg, word)
        if why:
            raise Refusal(why)
        steps = OmegaConf.select(cfg, "client.steps")
        if word.lstrip("+").startswith("client.epochs=") and steps is not None:
            _warn_of_epochs(word, steps)


@cache  # a comparison composes many configs
def _warn_of_epochs(word: str, steps: int) -> None:
    """Does not refuse: FedGC sets ``client.steps``, and a comparison sets all methods' epochs."""
    log.warning(
        "%s has no effect with client.steps=%s, which this algorithm, this experiment or you have"
        " set: client.steps=null trains epochs",
        word,
        steps,
    )


def refuse_measure_of_search(words: Sequence[str]) -> None:
    """Raises Refusal if the user set ``optimized_metric``, because there is no search."""
    for word in words:
        key, _, value = word.removeprefix("++").partition("=")
        if key == SEARCHED and value != "null":
            raise Refusal(
                f"{word} has no effect without a search, such as -m hparams_search=digits_optuna."
            )


def _why_without_effect(cfg: DictConfig, word: str) -> str:
    """The sentence about an override that has no effect; empty for others."""
    key, _, _ = word.lstrip("+").partition("=")
    return _why_switched_off(cfg, key) or _why_idle(cfg, key)


def _why_idle(cfg: DictConfig, key: str) -> str:
    """The sentence about a key of :data:`IDLE` that has no effect; empty for other keys."""
    for keys, (other, idle_values) in IDLE.items():
        if not re.fullmatch(keys, key):
            continue
        value = OmegaConf.select(cfg, other)
        if value in idle_values:
            shown = {None: "null", False: "false"}.get(value, value)
            return f"{key} has no effect with {other}={shown}: change {other}, or leave it out."
    return ""


def _why_switched_off(cfg: DictConfig, key: str) -> str:
    """The sentence about a key of a group that is switched off; empty for other keys."""
    group = key.partition(".")[0]
    if group not in SWITCHES or group == key:
        return ""
    node = cfg.get(group)
    if not OmegaConf.is_dict(node) or node.get("_target_"):
        return ""
    choices = [f"{group}={option}" for option in _options(group) if option != "none"]
    return f"{key} has no effect without {' or '.join(choices)}."


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
        with initialize_config_dir(str(folder.resolve()), version_base=None):
            yield
    finally:
        hydra.hydra = command


def explained(error: Exception) -> str:
    """The message of one of COMPOSING_ERRORS in one line, with a suggestion."""
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown is not None:
        return _unknown_key(unknown[1], error)
    several = re.search(r"Ambiguous value for argument '([^=]+)=(.+)'", str(error))
    if several is not None:
        key, values = several.groups()
        return (
            f"{key}={values} has several values: add -m for a run of each, or write a list as"
            f" '{key}=[{values}]'."
        )
    without = re.search(r"Interpolation key 'tags\.(\w+)' not found", str(error))
    if without is not None:  # by a user's own file
        tagged = without[1]
        return (
            f"tags.{tagged} is missing, and it names the folder of the run: either {tagged} is"
            f" null, which no run can be, or its file lacks tags: {{{tagged}: <its name>}}."
        )
    group, _, option = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group and isinstance(error, MissingConfigException):
        return _unknown_option(group, option, error.options or _options(group))
    message = message_of(str(error).partition("\nSee https://")[0])
    word: str | None = getattr(error, "override", None)
    return message if word is None else f"{word}: {message}"


def _unknown_key(key: str, error: Exception) -> str:
    """The message about a key that the config lacks. The error holds that config."""
    value = re.search(rf"\+{re.escape(key)}=(\S+)", str(error))
    choices = _choosing(value[1]) if value and "." not in key else []
    if choices:
        return f"{key}: there is no such key{did_you_mean(choices)}"
    node = getattr(error.__cause__, "parent_node", None)
    cfg = OmegaConf.create() if node is None else node._get_root()
    known = _keys_to_type(cfg)
    return _why_switched_off(cfg, key) or f"{key}: there is no such key{suggestion(key, known)}"


def _unknown_option(group: str, option: str, known: Sequence[str]) -> str:
    known = [name for name in known if name != "base"]
    listed = f"There are {', '.join(known)}."
    if option == "none":
        return f"{group}=null: {group} cannot be left out; set its keys instead. {listed}"
    for file in Path.cwd().glob(f"*/{group}/{option}.yaml"):
        folder = file.relative_to(Path.cwd()).parts[0]
        return (
            f"{group}={option}: there is no such option without {folder}/{group}/{option}.yaml: add"
            f" --config-dir {folder} (in Python config_dir='{folder}')."
        )
    hint = suggestion(option, known, f"{group}=")
    if group in TARGETS and DOTTED_NAME.fullmatch(option):
        hint = f": did you mean {TARGETS[group]}={option}?"
    return f"{group}={option}: there is no such option{hint} {listed}"


def _options(group: str) -> list[str]:
    """The options of a group of this project."""
    return sorted(file.stem for file in CONFIGS.glob(f"{group}/*.yaml") if file.stem != "base")


def _choosing(option: str) -> list[str]:
    """The overrides that choose an option of this name. ``cuda`` is another word for ``gpu``."""
    option = "gpu" if option == "cuda" else option
    return [f"{group}={option}" for group in GROUPS if option in _options(group)]


def is_override(word: str) -> bool:
    """Whether a word of the command line is an override, such as ``seed=2`` or ``~callbacks``."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def refuse_words(typed: Sequence[str], path: Path) -> None:
    """Raises Refusal for words of the command line that are no overrides and no flags of Hydra.

    Args:
        typed: all words.
        path: the config file of the command.
    """
    flags = [word for word in typed if not is_override(word)]
    known, unknown = get_args_parser().parse_known_args(flags)
    for name, value in vars(known).items():
        if value == "":
            raise Refusal(f"--{name.replace('_', '-')} has no value.")
    for word in (*unknown, *known.overrides):
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        hint = did_you_mean(_choosing(name))
        if hint == ".":
            hint = suggestion(name, _keys_to_type(_new_config((), path)), after="=…")
        raise Refusal(f"{word}: a setting is written key=value, and --help shows all{hint}")


def _keys_to_type(cfg: DictConfig) -> list[str]:
    """The keys of a config and the groups, without keys that only repeat another one, as
    data.num_clients does.
    """
    tree = OmegaConf.to_container(cfg)
    keys = [key for key, value in _values(tree) if not _repeats(key, value)]
    return [*(key for key in keys if not key.startswith("hydra.")), *GROUPS]


def _repeats(key: str, value: Any) -> bool:
    """Whether a key's value is that of another key with the same last part."""
    other = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
    return other is not None and other[1].split(".")[-1] == key.split(".")[-1]


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


def _shares_words(one: str, other: str) -> bool:
    """Whether all words of one name are in the other: those of ``epochs`` in ``local_epochs``."""
    return f"_{one}_" in f"_{other}_" or f"_{other}_" in f"_{one}_"


def suggestion(word: str, known: Iterable[str], before: str = "", after: str = "") -> str:
    """``: did you mean client.optimizer.lr?``, or a full stop.

    A key of a group gets keys of this group only. Else keys of the same depth go first.
    """
    known = list(known)
    group, dot, _ = word.partition(".")
    in_group = [other for other in known if other.startswith(f"{group}.")] if dot else []
    names = {other: other.split(".")[-1] for other in in_group or known}
    last = word.split(".")[-1]
    nearest = closest(last, {*names.values()})
    near = [other for other, name in names.items() if name in nearest]
    sharing = [other for other, name in names.items() if _shares_words(last, name)]
    alike = near or sharing
    depth = word.count(".")
    as_deep = [other for other in alike if other.count(".") == depth]
    best = as_deep or alike
    return did_you_mean([before + other + after for other in best[:3]])
