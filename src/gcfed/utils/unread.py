"""Refuses settings that nothing reads: a misspelt key added with ``+``, or in a YAML file.

A constructor refuses arguments that it does not know. So only keys outside of objects are compared
with those of the config files.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from gcfed.utils.files import YamlLoader
from gcfed.utils.keys import GROUPS, keys_of
from gcfed.utils.near import suggestion
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import CONFIGS

#: Sections of which each node with a ``_target_`` is an object.
NAMED_OBJECTS = ("callbacks", "logger", "methods", "metrics")


def refuse_unread(cfg: DictConfig) -> None:
    """Raises Refusal for a key that nothing reads.

    A key is read if a config file has it, if it is an argument of an object, or if an interpolation
    refers to it.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    used = set(_words_of_interpolations(tree))
    for key in _unread(tree, ""):
        if any(word == key or word.startswith(f"{key}.") for word in used):
            continue
        section, _, name = key.partition(".")
        if section in NAMED_OBJECTS:
            node = f"{section}.{name.partition('.')[0]}"
            raise Refusal(f"{key} has no effect: {node} builds nothing without {node}._target_.")
        hint = suggestion(key, sorted(known_keys()))
        raise Refusal(f"{key}: nothing reads this setting{hint}")


def _unread(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The keys of a node, and of the nodes below it, that no config file has."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        is_node = isinstance(value, dict)
        # a name of the user's own, in front of a node or of null
        may_be_new = prefix[:-1] in NAMED_OBJECTS and (is_node or value is None)
        if key not in known_keys() and not may_be_new:
            yield key
        elif is_node and not value.get("_target_"):  # else its constructor looks at its arguments
            yield from _unread(value, f"{key}.")


@cache
def known_keys() -> frozenset[str]:
    """The groups, and the keys of all config files."""
    known = {*GROUPS, *NAMED_OBJECTS}
    for path in CONFIGS.rglob("*.yaml"):
        group = path.parent.relative_to(CONFIGS).as_posix().replace("/", ".")
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=YamlLoader) or {}
        content.pop("defaults", None)
        is_global = group == "." or text.startswith("# @package _global_")
        known.update(keys_of(content, "" if is_global else f"{group}."))
    return frozenset(known)


def _words_of_interpolations(node: Any) -> Iterator[str]:
    """The dotted words within the interpolations of a tree, such as ``data.path``."""
    if isinstance(node, str):
        if "${" in node:
            without_texts = re.sub(r"'[^']*'", "", node)
            yield from re.findall(r"[\w.]+", without_texts)
    elif isinstance(node, Mapping | list):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _words_of_interpolations(value)
