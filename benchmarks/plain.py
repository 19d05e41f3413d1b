"""The limit: the same local steps in a plain PyTorch loop, and the device's own rate of matrix
products.
"""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.training.batches import BatchPlan


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean loss of classes, logits ``[B, C]``, or of all positions of texts, ``[B, T, C]``."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def plain_seconds(
    net: nn.Module,
    data: FederatedDataModule,
    plans: list[BatchPlan],
    optimizer: Callable[..., Optimizer],
    autocast: Callable[[], AbstractContextManager],
) -> float:
    """Seconds of one model trained on these batches: index, crop and flip, forward, backward, step,
    nothing else.
    """
    net = copy.deepcopy(net).train()
    stepper = optimizer(net.parameters())
    device = next(net.parameters()).device
    synchronize(device)
    started = time.perf_counter()
    for plan in plans:
        for k, t in zip(*plan.counts.nonzero(), strict=True):
            size = int(plan.counts[k, t])
            x, y = data.fetch(
                plan.index[k, t, :size], None if plan.augment is None else plan.augment[k, t, :size]
            )
            stepper.zero_grad()
            with autocast():
                loss = cross_entropy(net(x), y)
            loss.backward()
            stepper.step()
    synchronize(device)
    return time.perf_counter() - started


SHAPES = [(n, n, n) for n in (128, 256, 512, 1024, 2048)] + [
    (8192, 512, 512),
    (4096, 800, 64),
    (50, 4096, 512),
]
"""(m, k, n) of the matrix products: squares, and those of large and small layers."""


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of matrix products on this process's threads or this GPU: the best of several shapes,
    whose outputs are there already. On a processor one shape alone may lie below what a whole
    training loop reaches.
    """
    shapes = [(8 * m, 8 * k, 8 * n) for m, k, n in SHAPES] if device.type == "cuda" else SHAPES
    return max(_product_rate(shape, device, dtype) for shape in shapes)


def _product_rate(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> float:
    m, k, n = shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    out, best = torch.empty(m, n, device=device, dtype=dtype), float("inf")
    # in one measurement, so that a small product is no clock tick
    times = min(1000, max(1, round(1e9 / (m * k * n))))
    for _ in range(5):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(a, b, out=out)
        synchronize(device)
        best = min(best, (time.perf_counter() - started) / times)
    return 2 * m * k * n / best


def training_flops(net: nn.Module, data: FederatedDataModule, device: torch.device) -> float:
    """Floating-point operations of a training step, forward and backward, for one sample."""
    net = copy.deepcopy(net).train()
    x, y = data.fetch(torch.arange(8, device=device), None)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(net(x), y).backward()
    return counter.get_total_flops() / len(x)
