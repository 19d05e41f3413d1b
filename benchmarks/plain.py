"""The limit: the same local steps in a plain PyTorch loop, and the device's own rate of matrix products."""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.batches import BatchPlan


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain_seconds(
    net: nn.Module,
    data: FederatedDataModule,
    plans: list[BatchPlan],
    optimizer: Callable[..., Optimizer],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """Seconds of one model trained on these batches: index, crop and flip, forward, backward, step, nothing else."""
    net = copy.deepcopy(net).train()
    stepper = optimizer(net.parameters())
    device = next(net.parameters()).device
    synchronize(device)
    started = time.perf_counter()
    for plan in plans:
        for k, t in zip(*plan.counts.nonzero(), strict=True):
            size = int(plan.counts[k, t])
            x, y = data.fetch(plan.index[k, t, :size], None if plan.augment is None else plan.augment[k, t, :size])
            stepper.zero_grad()
            with autocast():
                loss = F.cross_entropy(net(x), y)
            loss.backward()
            stepper.step()
    synchronize(device)
    return time.perf_counter() - started


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products on this process's threads or this GPU: the best of ten."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        started = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


def training_flops(net: nn.Module, data: FederatedDataModule, device: torch.device) -> float:
    """Floating-point operations of a training step, forward and backward, for one sample."""
    net = copy.deepcopy(net).train()
    x, y = data.fetch(torch.arange(8, device=device), None)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(x), y).backward()
    return counter.get_total_flops() / len(x)
