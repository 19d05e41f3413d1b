"""The one way from a config node to an object."""

from typing import Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig


def build(node: DictConfig | None, **kwargs: Any) -> Any:
    """``hydra.utils.instantiate``; None for an absent node or one without ``_target_``.

    Raises:
        ValueError, FileNotFoundError: what the constructor raised, with its own message, not Hydra's wrapping of it.
    """
    if not node or node.get("_target_") is None:
        return None
    try:
        return hydra.utils.instantiate(node, _convert_="all", **kwargs)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | FileNotFoundError):
            raise cause from None  # ours name their key
        if isinstance(cause, TypeError):
            raise ValueError(f"{node._get_full_key(None)}: {cause}") from None
        raise


def build_all(nodes: DictConfig | None, **common: Any) -> list[Any]:
    """The objects of a dict of nodes, in its order, without the empty ones.

    ``common`` goes to those nodes that name the key.
    """
    built = []
    for node in (nodes or {}).values():
        built.append(build(node, **{k: v for k, v in common.items() if node and k in node}))
    return [obj for obj in built if obj is not None]
