"""Tensors of K clients: one row for each, ``[K, *shape]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_rows(tensor: Tensor, k: int) -> Tensor:
    """An uninitialised ``[k, *shape]`` tensor whose rows have the memory format of ``tensor``.

    Rows of several clients on a CPU are contiguous. vmap makes their convolutions one grouped
    convolution. If the batches have a single sample, torch 2.15 may return wrong gradients of its
    channels_last weights: of all kernels in float64, of 1×1 kernels in float32.
    """
    if k > 1 and tensor.device.type == "cpu":
        return tensor.new_empty((k, *tensor.shape))
    return torch.empty_strided(
        (k, *tensor.shape),
        (tensor.numel(), *tensor.stride()),
        dtype=tensor.dtype,
        device=tensor.device,
    )


def per_client(values_K: Tensor, like_K: Tensor) -> Tensor:
    """``[K]`` → ``[K, 1, …]``, to scale or select the rows of a tensor ``[K, *shape]``."""
    return values_K.view(-1, *[1] * (like_K.dim() - 1))


def inner_products(
    a_K: Sequence[Tensor], b_K: Sequence[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Each client's inner product ⟨a_k, b_k⟩ over all tensors, ``[n, *shape]`` each → ``[n]``.

    Args:
        b_K: tensors of ``[*shape]`` are one b for all clients.
        dtype: the type of the sums; None: the type of the tensors.
    """
    products = []
    for a, b in zip(a_K, b_K, strict=True):
        product = (a * b).reshape(len(a), -1)
        products.append(product.sum(1, dtype=dtype))
    return torch.stack(products).sum(0)


def client_norms(tensors_K: Sequence[Tensor]) -> Tensor:
    """Each client's Euclidean norm over all its tensors, ``[n, *shape]`` → ``[n]``."""
    squares = []
    for t in tensors_K:
        square = t.square()
        squares.append(square.sum(dim=tuple(range(1, t.dim()))) if t.dim() > 1 else square)
    return torch.stack(squares).sum(0).sqrt()
