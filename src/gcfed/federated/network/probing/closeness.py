"""Compares tensors that should be equal, or equal except for the rounding of another order of sums.
A NaN is equal to a NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gcfed.utils.layout import in_memory_order

PIECE = 1 << 20  # entries that are compared at a time


def are_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    # almost all are equal, and ``nan_to_num`` makes copies
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


def is_close(found: Tensor, expected: Tensor, rounding: float = 0.0) -> bool:
    """Whether two tensors agree, entry by entry.

    Args:
        rounding: an absolute difference that two entries may have in addition to the tolerance.
    """
    if found.dtype != expected.dtype:  # autocast in a stack may cast other tensors
        return False
    if found.shape != expected.shape:
        return False
    if expected.dtype == torch.bool:
        return torch.equal(found, expected)
    atol = 1e-5 * largest_finite(expected) + rounding
    [found], [expected] = in_memory_order([found], [expected])
    # A comparison makes five copies, so it takes a piece at a time.
    found_pieces = found.reshape(-1).split(PIECE)
    expected_pieces = expected.reshape(-1).split(PIECE)
    for piece, other in zip(found_pieces, expected_pieces, strict=True):
        if not torch.allclose(piece, other, rtol=1e-4, atol=atol, equal_nan=True):
            return False
    return True


def are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether outputs (the first tensor of each) and gradients (the others) agree.

    A gradient may be 0 except for rounding, as that of attention's key bias is. So gradients may
    also differ by a millionth of the largest entry of all gradients.
    """
    output, *gradients = expected
    if not is_close(found[0], output):
        return False
    rounding = 1e-6 * max(map(largest_finite, gradients), default=0.0)
    for gradient, other in zip(found[1:], gradients, strict=True):
        if not is_close(gradient, other, rounding):
            return False
    return True


def largest_finite(t: Tensor) -> float:
    """The largest absolute value, without NaN and ±∞; 0 if there is none."""
    if not t.numel():
        return 0.0
    if t.is_complex():
        t = t.abs()
    low, high = torch.aminmax(t)
    if not (low.isfinite() and high.isfinite()):
        low, high = torch.aminmax(t.nan_to_num(0.0, 0.0, 0.0))
    return max(-float(low), float(high))
