"""The one way from a config node to an object."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import InstantiationException
from hydra.utils import get_object
from omegaconf import DictConfig

TRUSTED = ("gcfed.", "torch.nn.", "torch.optim.", "torchvision.models.")


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


def flag(key: str, value: Any) -> bool:
    """``value`` if it is a boolean: any other word would count as true.

    Raises:
        ValueError: it is not; names the key.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value} must be true or false.")
    return value


def build_all(nodes: DictConfig | None, **common: Any) -> list[Any]:
    """The objects of a dict of nodes, in its order, without the empty ones.

    ``common`` goes to those nodes that name the key.
    """
    built = []
    for node in (nodes or {}).values():
        built.append(build(node, **{k: v for k, v in common.items() if node and k in node}))
    return [obj for obj in built if obj is not None]


def check_targets(config: Mapping[str, Any], path: Path) -> None:
    """Refuses a checkpoint's config that names code other than this project's, torch's or torchvision's networks.

    Whoever sends a checkpoint chooses what its config calls. An attribute counts by where it is defined, so that
    ``gcfed.run.os.system`` is not ours.

    Raises:
        ValueError: names the key, the target and the flag that allows it.
    """
    for key, target in _targets(config):
        defined = f"{getattr(_located(target), '__module__', None)}."
        if not (target.startswith(TRUSTED) and defined.startswith(TRUSTED)):
            raise ValueError(
                f"{path}: its config would call {key}={target}. Only {', '.join(TRUSTED)[:-1]} are called from a "
                "checkpoint; if you trust its author, say trust_config=true."
            )


def _targets(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if key == "_target_" and value is not None:
            yield f"{prefix}_target_", str(value)
        yield from _targets(value, f"{prefix}{key}.")


def _located(target: str) -> Any:
    try:
        return get_object(target) if target.startswith(TRUSTED) else None
    except (ImportError, ValueError, AttributeError):
        return None
