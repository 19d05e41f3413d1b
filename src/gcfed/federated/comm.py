"""Bytes that a round sends down to the clients and up to the server, as each method really sends them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of a set of tensors in bytes."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass
class CommLog:
    """Bytes of one round, summed over its cohort; methods add what they send beside the model."""

    down_bytes: int = 0
    up_bytes: int = 0
