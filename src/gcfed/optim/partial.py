"""Optimizers as the config gives them, as partials of their classes: their settings, a trial step,
faster forms.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from gcfed.utils.checked import SettingError
from gcfed.utils.instantiate import BuildError

MakeOptimizer = Callable[..., Optimizer]


def probe_optimizer(optimizer: MakeOptimizer) -> Optimizer:
    """The optimizer that a partial makes, for one unused number.

    Its class and ``defaults`` are the settings.
    """
    return optimizer([torch.zeros(1, requires_grad=True)])


def try_optimizer(optimizer: MakeOptimizer, key: str) -> MakeOptimizer:
    """The same partial, after its optimizer made a step with nothing but a gradient.

    Raises BuildError, with the config key, if torch refuses a setting or the step fails.
    """
    try:
        idle = torch.zeros(1, requires_grad=True)
        idle.grad = torch.zeros(1)
        made = optimizer([idle])
        for name, value in made.defaults.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}={value} is not finite")
        made.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BuildError(
            f"{key}{'.' if isinstance(error, SettingError) else ': '}{error}"
        ) from None
    return optimizer


def first_move(optimizer: MakeOptimizer, gradient: float) -> float:
    """How far the first step moves a weight with this gradient."""
    weight = torch.zeros(1, requires_grad=True)
    made = optimizer([weight])
    weight.grad = torch.full((1,), gradient)
    with torch.random.fork_rng(devices=()):  # a step may add noise
        made.step()
    return abs(float(weight.detach()))


def is_elementwise(optimizer: MakeOptimizer) -> bool:
    """Whether it treats each number by itself: the first of two clients in a tensor moves as if
    alone, in a row.

    The numbers suit rules that depend on norms, on the number of axes, on their sizes, or on angles
    (here 90°).
    """
    start, grad = (
        torch.linspace(a, b, 2048, dtype=torch.double).repeat_interleave(4)
        for a, b in ((-1, 5), (3, -2))
    )
    start[::4], grad[::4] = 2 * start[::4], -1.5 * grad[::4]
    moves = []
    for n, shape in ((8192, (2, 64, 64)), (4096, (4096,))):
        t = start[:n].clone().view(shape).requires_grad_()
        made = optimizer([t])
        with torch.random.fork_rng(devices=()):  # a step may add noise
            for _ in range(3):
                torch.default_generator.manual_seed(0)  # torch.manual_seed would format a traceback
                t.grad = grad[:n].clone().view(shape)
                made.step()
        moves.append(t.detach().flatten()[:4096] - start[:4096])
    return torch.allclose(moves[0], moves[1], rtol=1e-4, atol=1e-12)


def fused(optimizer: MakeOptimizer) -> MakeOptimizer:
    """The same optimizer in its fused form, if torch has one and the user chose no other form."""
    made, given = (
        (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    )
    if (
        "fused" not in inspect.signature(made).parameters
        or {"fused", "foreach", "differentiable"} & given.keys()
    ):
        return optimizer
    return partial(optimizer, fused=True)


def unprofiled_step(optimizer: Optimizer) -> Callable[[], object]:
    """``optimizer.step`` without its profiler hook, which takes 5 % of a small network's local
    step.

    SGD on a CPU spends another 8 % on sorting its tensors by device and type, so its kernel is
    called directly.
    """
    step = partial(
        inspect.unwrap(type(optimizer).step, stop=lambda f: not hasattr(f, "hooked")), optimizer
    )
    group, *others = optimizer.param_groups
    alike = len({p.dtype for p in group["params"]}) == 1 and all(
        p.device.type == "cpu" for p in group["params"]
    )
    if others or not alike or type(optimizer) is not torch.optim.SGD or not group["fused"]:
        return step

    def kernel() -> object:
        params = group["params"]
        momentum = group["momentum"]
        grads: list[Any] = [p.grad for p in params]
        buffers: list[Any] = (
            [optimizer.state[p].get("momentum_buffer") for p in params] if momentum else []
        )
        missing = [t is None for t in buffers]
        if any(t is None or t.is_sparse for t in grads) or 0 < sum(missing) < len(params):
            return step()
        first = any(missing)
        if first:  # the kernel fills the buffers
            for i, p in enumerate(params):
                buffers[i] = optimizer.state[p]["momentum_buffer"] = torch.empty_like(grads[i])
        settings = {
            name: group[name]
            for name in ("weight_decay", "lr", "dampening", "nesterov", "maximize")
        }
        with torch.no_grad():  # a decorator would be made anew for each client
            return torch._fused_sgd_(
                params, grads, buffers, momentum=momentum, **settings, is_first_step=first
            )

    return kernel


def starts_at_zero(optimizer: Optimizer) -> bool:
    """Whether its first step equals a step from a state of zeros, as for Adam, and for SGD without
    dampening.
    """
    kind = type(optimizer)
    sgd = torch.optim.SGD
    return kind in (torch.optim.Adam, torch.optim.AdamW) or (
        kind is sgd and not optimizer.defaults["dampening"]
    )
