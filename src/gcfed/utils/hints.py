"""The sentences about overrides that Hydra refuses. They suggest a known key or option."""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.utils.idle import why_switched_off
from gcfed.utils.keys import keys_to_type, options_of, overrides_choosing
from gcfed.utils.near import did_you_mean, suggestion
from gcfed.utils.refusal import message_of

#: What Hydra raises for a wrong override, or for a user's own file that is no YAML.
COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
#: Groups that may use a class or function of the user's own → the words that name it.
TARGETS = {
    "aggregator": "aggregator._target_",
    "algorithm": "+methods.mine._target_",
    "data": "data=own data.dataset._target_",
    "metrics": "+metrics.mine._target_",
    "model": "model._target_",
    "partition": "partition=iid partition._target_",
}
#: ``mynet.Net``
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


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
        return unknown_option(group, option, error.options or options_of(group))
    message = message_of(str(error).partition("\nSee https://")[0])
    word: str | None = getattr(error, "override", None)
    return message if word is None else f"{word}: {message}"


def _unknown_key(key: str, error: Exception) -> str:
    """The message about a key that the config lacks. The error holds that config."""
    value = re.search(rf"\+{re.escape(key)}=(\S+)", str(error))
    choices = overrides_choosing(value[1]) if value and "." not in key else []
    if choices:
        return f"{key}: there is no such key{did_you_mean(choices)}"
    node = getattr(error.__cause__, "parent_node", None)
    cfg = OmegaConf.create() if node is None else node._get_root()
    known = keys_to_type(cfg)
    return why_switched_off(cfg, key) or f"{key}: there is no such key{suggestion(key, known)}"


def unknown_option(group: str, option: str, known: Sequence[str]) -> str:
    """The message about an option that a group lacks. ``known``: the group's options."""
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


def with_dashes(flag: str, behind: Sequence[str], known: Sequence[str]) -> str:
    """The message about a setting that is written like a flag, such as ``--epochs 3``.

    Args:
        behind: the words that follow it and are no overrides.
        known: all keys.
    """
    key, _, value = flag.lstrip("-").partition("=")
    if not value and behind and not behind[0].startswith("-"):
        value = behind[0]
    hint = suggestion(key.replace("-", "_"), known, after=f"={value or '…'}")
    return f"{flag}: a setting has no dashes{hint}"


def bare_word(word: str, known: Sequence[str]) -> str:
    """The message about a word without ``=``. ``known``: all keys."""
    choices = overrides_choosing(word)
    if choices:
        return f"{word}{did_you_mean(choices)}"
    hint = suggestion(word, known, after="=…")
    return f"{word}: a setting is written key=value, and --help shows all settings{hint}"
