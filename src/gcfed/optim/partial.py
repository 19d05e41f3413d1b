"""Optimizers as partials of their classes, as the config gives them: probed for their settings, checked, made fast."""

import inspect
from collections.abc import Callable
from functools import partial
from types import GenericAlias
from typing import Any

import torch
from torch.optim import Optimizer

from gcfed.utils.checked import SettingError, ShareBelow1, Weight, fits
from gcfed.utils.instantiate import BuildError

MakeOptimizer = Callable[..., Optimizer]
SHARES = ("momentum", "betas", "beta1", "alpha", "rho")  # decay rates: at 1 nothing would ever fade


def probe_optimizer(optimizer: MakeOptimizer) -> Optimizer:
    """What a partial makes, on one idle number: its class and ``defaults`` are the settings that it has."""
    return optimizer([torch.zeros(1, requires_grad=True)])


def try_optimizer(optimizer: MakeOptimizer, key: str) -> MakeOptimizer:
    """The same partial, once it has built an optimizer that steps on a gradient alone.

    Raises:
        BuildError: it builds none, or a setting is out of its range; names the config key.
    """
    try:
        _check_settings(optimizer, key)
        idle = torch.zeros(1, requires_grad=True)
        idle.grad = torch.zeros(1)
        optimizer([idle]).step()
    except SettingError as error:
        raise BuildError(f"{key}.{error}") from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise BuildError(f"{key}: {error}") from None
    return optimizer


def fused(optimizer: MakeOptimizer) -> MakeOptimizer:
    """The same optimizer in its one-pass form, where torch has one and the user chose no other."""
    made, given = _parts(optimizer)
    accepts = "fused" in inspect.signature(made).parameters
    if not accepts or {"fused", "foreach", "differentiable"} & given.keys():
        return optimizer
    return partial(optimizer, fused=True)


def unprofiled_step(optimizer: Optimizer) -> Callable[[], object]:
    """``optimizer.step`` without the profiler's range around each call, 5 % of a small network's local step."""
    step = type(optimizer).step
    return partial(inspect.unwrap(step, stop=lambda f: not hasattr(f, "hooked")), optimizer)


def starts_at_zero(optimizer: Optimizer) -> bool:
    """Whether its first step equals one on a state of zeros: true of Adam, and of SGD without dampening."""
    kind, sgd = type(optimizer), torch.optim.SGD
    return kind in (torch.optim.Adam, torch.optim.AdamW) or (kind is sgd and not optimizer.defaults["dampening"])


def _parts(optimizer: MakeOptimizer) -> tuple[MakeOptimizer, dict[str, Any]]:
    """What builds the optimizer, and the settings that it is given."""
    return (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})


def _check_settings(optimizer: MakeOptimizer, key: str) -> None:
    """Refuses unknown settings, and values that ``torch.optim`` accepts in part: NaN, ∞, negative numbers and text."""
    made, given = _parts(optimizer)
    known = inspect.signature(made).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for name, value in given.items():
        if name not in known and not takes_any:
            remedy = f"take another {key.split('.')[0]}, or drop the setting with ~{key}.{name}"
            raise SettingError(name, f" is set, but {made.__name__} has no such setting: {remedy}.")
        default = getattr(known.get(name), "default", None)
        number: Any = ShareBelow1 if name in SHARES else Weight
        if isinstance(default, bool):
            fits(name, value, bool)
        elif isinstance(default, tuple):
            entries = tuple(value) if isinstance(value, list) else value
            fits(name, entries, GenericAlias(tuple, (number,) * len(default)))
        elif isinstance(default, int | float):
            fits(name, value, number)
