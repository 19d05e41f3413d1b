"""Refuses settings that nothing reads: a misspelt key added with ``+``, or in a YAML file.

A constructor refuses arguments that it does not know. So only sections that nothing builds are
compared with the keys of the config files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from gcfed.utils.compose import GROUPS, keys_of, suggestion
from gcfed.utils.files import YamlLoader
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import CONFIGS

#: Sections that are one object each, if they have a ``_target_``.
OBJECTS = frozenset(
    (
        "aggregator",
        "attack",
        "client",
        "client_store",
        "data",
        "federation",
        "gc",
        "model",
        "partition",
        "privacy",
        "quantization",
        "server",
        "task",
        "trainer",
        "participation.faults",
        "participation.sampler",
    )
)
#: Sections of which each node with a ``_target_`` is an object.
NAMED_OBJECTS = ("callbacks", "logger", "methods", "metrics")


def refuse_unread(cfg: DictConfig) -> None:
    """Raises Refusal for a key that has no effect.

    It has an effect if it is an argument, if a config file has it, or if an interpolation refers to
    it.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    used = set(_words_of_interpolations(tree))
    for key in _unread(tree, ""):
        if not any(word == key or word.startswith(f"{key}.") for word in used):
            raise Refusal(_refusal(key, tree))


def _refusal(key: str, tree: Mapping[str, Any]) -> str:
    section, _, name = key.partition(".")
    if section in NAMED_OBJECTS:
        node = ".".join([section, *name.split(".")[:1]])
        return f"{key} has no effect: {node} builds nothing without {node}._target_."
    if "." not in key:
        names = {*known_keys(), *GROUPS, *NAMED_OBJECTS}
        top = sorted(name for name in names if "." not in name)
        return f"{key}: nothing reads this setting{suggestion(key, top)}"
    if section in OBJECTS and not tree[section].get("_target_"):
        return (
            f"{key} has no effect, because {section} builds nothing without {section}._target_:"
            f" choose another {section}=, or leave {key} out."
        )
    return f"{key}: nothing reads this setting{suggestion(key, sorted(known_keys()))}"


def _unread(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The keys of a node, and of the nodes below it, that no config file has."""
    known = known_keys()
    for name, value in node.items():
        key = f"{prefix}{name}"
        if _is_object(key, value):
            continue  # its constructor looks at its arguments
        if prefix[:-1] in NAMED_OBJECTS:
            yield from _keys_of_nothing(key, value)
        elif key not in known and key not in GROUPS and key not in NAMED_OBJECTS:
            yield key
        elif isinstance(value, dict):
            yield from _unread(value, f"{key}.")


def _is_object(key: str, value: Any) -> bool:
    if not isinstance(value, dict) or not value.get("_target_"):
        return False
    return key in OBJECTS or key.rpartition(".")[0] in NAMED_OBJECTS


def _keys_of_nothing(key: str, value: Any) -> Iterator[str]:
    """The keys of a node that builds nothing; none if it is empty or switched off."""
    if isinstance(value, dict):
        if "_target_" not in value:
            keys = [f"{key}.{name}" for name in value]
            yield from (name for name in keys if name not in known_keys())
    elif value is not None:
        yield key


@cache
def known_keys() -> frozenset[str]:
    """The keys of all config files outside the objects' own groups.

    Experiments also set keys of objects that the command line may leave out.
    """
    known = set[str]()
    for path in CONFIGS.rglob("*.yaml"):
        group = path.parent.relative_to(CONFIGS).as_posix().replace("/", ".")
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=YamlLoader) or {}
        content.pop("defaults", None)
        is_global = group == "." or text.startswith("# @package _global_")
        package = "" if is_global else f"{group}."
        if group in OBJECTS and path.stem != "none":
            # Its arguments: without the object, nothing reads them.
            if not is_global:
                continue
            if path.with_name("none.yaml").is_file():
                content.pop(group, None)
        if group not in ("experiment", "debug"):
            for section in NAMED_OBJECTS:
                content.pop(section, None)
        if package.rstrip(".") not in NAMED_OBJECTS:
            known.update(keys_of(content, package))
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
