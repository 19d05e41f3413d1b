"""What makes a run the run that it is, as keys of its config. Imports nothing heavy: the report reads it too."""

from collections.abc import Mapping
from typing import Any

#: A checkpoint continues under the same values only, and runs that differ in ``seed`` alone are repetitions.
IDENTITY = (
    "seed", "precision", "data", "partition", "participation", "model", "client", "server", "aggregator", "methods",
    "gc", "quantization", "client_store", "task",
)  # fmt: skip


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists and empty mappings are leaves."""
    if isinstance(tree, Mapping) and tree:
        return {k: v for key, sub in tree.items() for k, v in flat(sub, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}
