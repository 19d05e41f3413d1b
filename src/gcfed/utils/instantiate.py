"""The one way from a config node to an object."""

import re
import sys
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, Node, OmegaConf

from gcfed.utils.checked import SettingError
from gcfed.utils.compose import meant
from gcfed.utils.resolvers import how_to_install

_HYDRAS = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")  # its own keys; none becomes an argument


class BuildError(ValueError):
    """What a node of the config cannot be built of; names the key."""


def build(node: DictConfig | None, **kwargs: Any) -> Any:
    """``hydra.utils.instantiate``, a node at a time; None for an absent node or one without ``_target_``.

    Raises:
        BuildError: one sentence with the key of the setting, or with all settings of the node.
        FileNotFoundError: what the constructor raised.
    """
    if not node or node.get("_target_") is None:
        return None
    for key, kind, what in (("_target_", str, "the name of what is built"), ("_partial_", bool, "true or false")):
        if key in node and not isinstance(node[key], kind):
            raise BuildError(f"{node._get_full_key(key)}={node[key]} must be {what}.")
    try:
        target = _located(node["_target_"])
        settings = {str(key): _built(node[key]) for key in node if key not in _HYDRAS} | kwargs
        positional = _built(node.get("_args_") or [])
        return (partial(partial, target) if node.get("_partial_") else target)(*positional, **settings)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        if isinstance(cause, FileNotFoundError | BuildError):
            raise cause from None
        if isinstance(cause, SettingError):
            raise BuildError(f"{_key(node, cause.name)}{cause.rest}") from None
        text = " ".join(str(cause).split())
        shown = ", ".join(f"{k!s}={v}" for k, v in node.items() if not (OmegaConf.is_dict(v) and v))
        where: Any = node._get_full_key(None)
        raise BuildError(f"{where} cannot be built of {shown}: {text}") from cause


def _located(name: str) -> Any:
    try:
        _allow(name)
    except InstantiationException as error:
        module, _, part = name.rpartition(".")
        if module in sys.modules and part not in (found := vars(sys.modules[module])):
            raise ValueError(f"{module} has no {part}{meant(part, found) or '.'}") from None
        lost = error.__cause__ and error.__cause__.__cause__
        if module not in sys.modules and isinstance(lost, ModuleNotFoundError):
            raise ValueError(f"there is no module {lost.name} in {Path.cwd()} or installed.") from None
        raise
    return hydra.utils.get_object(name)


@cache
def _allow(name: str) -> None:
    """Hydra's own refusals, once a name: they take it longer than anything else here."""
    hydra.utils.instantiate({"_target_": name, "_partial_": True})


def _built(value: Any) -> Any:
    """A setting of a node, in which the nodes that name a ``_target_`` are built."""
    if OmegaConf.is_list(value):
        return [_built(item) for item in value]
    if not OmegaConf.is_dict(value):
        return value
    if "_target_" not in value:
        return {key: _built(value[key]) for key in value}
    if value["_target_"] is None:
        raise BuildError(f"{value._get_full_key('_target_')}=null must be the name of what is built.")
    return build(value)


def _key(node: DictConfig, name: str) -> str:
    """The key that a user sets: of a setting that follows another one, the other's."""
    raw = node._get_node(name, validate_access=False)  # None where it is missing
    followed = re.fullmatch(r"\$\{([a-z_][\w.]*)\}", str(raw)) if isinstance(raw, Node) else None
    return followed[1] if followed else node._get_full_key(name)


def optional(cfg: DictConfig, key: str, **kwargs: Any) -> Any:
    """The object of the node at ``key``; None where that is null, absent or without ``_target_``.

    Raises:
        BuildError: it is no node, or as :func:`build`; names the key.
    """
    node = cfg.get(key)
    if node is not None and not OmegaConf.is_dict(node):
        raise BuildError(f"{cfg._get_full_key(key)}={node} must be a group of settings, or null.")
    return build(node, **kwargs)


def require(cfg: DictConfig, key: str, **kwargs: Any) -> Any:
    """The object of a part that no run can do without.

    Raises:
        BuildError: there is none, or as :func:`optional`.
    """
    built = optional(cfg, key, **kwargs)
    if built is None:
        shown = f"._target_={cfg[key].get('_target_')}" if OmegaConf.is_dict(cfg.get(key)) else f"={cfg.get(key)}"
        raise BuildError(f"{cfg._get_full_key(key)}{shown} builds nothing, and no run can do without it.")
    return built


def build_all(cfg: DictConfig, key: str, **common: Any) -> list[Any]:
    """The objects of a dict of nodes, in its order, without the empty ones.

    ``common`` goes to those nodes that name the key.

    Raises:
        BuildError: it is neither a dict nor null, or as :func:`optional`.
    """
    nodes = cfg.get(key)
    if nodes is None:
        return []
    if not OmegaConf.is_dict(nodes):
        raise BuildError(f"{key}={nodes} must be groups of settings, or null.")
    built = []
    for name, node in nodes.items():
        named = {k: value for k, value in common.items() if OmegaConf.is_dict(node) and k in node}
        built.append(optional(nodes, str(name), **named))
    return [obj for obj in built if obj is not None]


def installed(package: str, key: str) -> None:
    """Refuses a setting whose package is not there.

    Raises:
        BuildError: names the setting and the command that installs the package, an extra of the same name.
    """
    found = find_spec(package)
    if found is None or found.origin is None:  # a folder of that name, as W&B makes one, is no package
        raise BuildError(f"{key} needs a package: {how_to_install(package)}")
