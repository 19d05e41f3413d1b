"""Bounds of a tensor's numbers."""

import torch
from torch import Tensor


def is_below(t: Tensor, limit: float) -> bool:
    """Whether all absolute values of a tensor on a CPU are below ``limit``. NaN is not."""
    # No entry is larger than the norm, which takes half as long as the extremes.
    if t.is_floating_point() and float(torch.linalg.vector_norm(t)) < limit:
        return True
    low, high = torch.aminmax(t)
    return -limit < float(low) and float(high) < limit
