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
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gcfed.optim.kernels import direct_step, ordered_step
from gcfed.utils.checked import SettingError, as_typed
from gcfed.utils.instantiate import BuildError, refuse_unknown, takes_any_key
from gcfed.utils.refusal import Refusal

MakeOptimizer = Callable[..., Optimizer]


def probe_optimizer(optimizer: MakeOptimizer) -> Optimizer:
    """The optimizer that a partial makes, for one unused number.

    Its class and ``defaults`` are the settings: those of its groups where they agree.
    """
    made = optimizer([torch.zeros(1, requires_grad=True)])
    made.defaults.update(_common_settings(made))
    return made


def has_several_settings(optimizer: Optimizer) -> bool:
    """Whether groups of its parameters have different settings, so that ``defaults`` are not those
    of all.
    """
    return len(_common_settings(optimizer)) < len(optimizer.defaults)


def _common_settings(optimizer: Optimizer) -> dict[str, Any]:
    """The settings that all groups of its parameters share."""
    common = {}
    for name in optimizer.defaults:
        first, *others = (group[name] for group in optimizer.param_groups)
        if all(other == first for other in others):
            common[name] = first
    return common


def try_optimizer(optimizer: MakeOptimizer, key: str) -> MakeOptimizer:
    """The same partial, after its optimizer made a step with nothing but a gradient.

    Raises BuildError, with the config key, if torch refuses a setting or the step fails.
    """
    if isinstance(optimizer, partial):
        _check_settings(optimizer, key)
    try:
        idle = torch.zeros(1, requires_grad=True)
        idle.grad = torch.zeros(1)
        made = optimizer([idle])
        for name, value in made.defaults.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise Refusal(f"{name}={value} is not finite")
        made.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BuildError(
            f"{key}{'.' if isinstance(error, SettingError) else ': '}{error}"
        ) from None
    return optimizer


def _check_settings(optimizer: partial, key: str) -> None:
    """Raises BuildError for a setting that the optimizer's constructor does not have, and for
    anything but a number where its default is one.
    """
    known = dict(inspect.signature(optimizer.func).parameters)
    known.pop("params", None)  # the parameters to train
    if not takes_any_key(known):
        refuse_unknown(key, optimizer.func.__name__, known, optimizer.keywords)
    for name, value in optimizer.keywords.items():
        default = known[name].default if name in known else None
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if is_number and not isinstance(value, int | float | torch.Tensor):
            raise BuildError(f"{key}.{name}={as_typed(value)} must be a number.")


def first_move(optimizer: MakeOptimizer, gradient: float) -> float:
    """How far the first step moves a weight with this gradient."""
    weight = torch.zeros(1, requires_grad=True)
    made = optimizer([weight])
    weight.grad = torch.full((1,), gradient)
    with torch.random.fork_rng(devices=()):  # a step may add noise
        made.step()
    return abs(float(weight.detach()))


def is_elementwise(optimizer: MakeOptimizer) -> bool:
    """Whether the optimizer updates each entry of a tensor independently of the others.

    The test stacks two clients in one tensor. The first client must move as it does alone. The
    entries are chosen so that rules are noticed that depend on norms, on the number of axes, on
    their sizes, or on angles (here 90°).
    """
    start = torch.linspace(-1, 5, 2048, dtype=torch.double).repeat_interleave(4)
    grad = torch.linspace(3, -2, 2048, dtype=torch.double).repeat_interleave(4)
    start[::4] *= 2
    grad[::4] *= -1.5
    moves = []
    for size, shape in ((8192, (2, 64, 64)), (4096, (4096,))):
        weight = start[:size].clone().view(shape).requires_grad_()
        made = optimizer([weight])
        with torch.random.fork_rng(devices=()):  # a step may add noise
            for _ in range(3):
                torch.default_generator.manual_seed(0)  # torch.manual_seed would format a traceback
                weight.grad = grad[:size].clone().view(shape)
                made.step()
        moves.append(weight.detach().flatten()[:4096] - start[:4096])
    return torch.allclose(moves[0], moves[1], rtol=1e-4, atol=1e-12)


def fused(optimizer: MakeOptimizer) -> MakeOptimizer:
    """The same optimizer in its fused form, if torch has one and the user chose no other form.

    SGD with dampening stays as it is: the fused form needs a momentum for parameters that had no
    gradient yet, and a momentum of zero would dampen their first gradient.
    """
    made: Callable[..., object] = optimizer
    given: dict[str, object] = {}
    if isinstance(optimizer, partial):
        made = optimizer.func
        given = optimizer.keywords
    has_form = not given.keys().isdisjoint({"fused", "foreach", "differentiable"})
    if has_form or given.get("dampening"):
        return optimizer
    if "fused" not in inspect.signature(made).parameters:
        return optimizer
    return partial(optimizer, fused=True)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether its ``step`` runs torch's code alone: no class of a user, no hook, no other
    ``step`` in the object.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    is_changed = "step" in vars(optimizer) or any(hooks)
    return type(optimizer).__module__.startswith("torch.optim.") and not is_changed


def unprofiled_step(optimizer: Optimizer) -> Callable[[], object]:
    """``optimizer.step``; torch's own without its profiler hook, or its kernel alone
    (:mod:`~gcfed.optim.kernels`).

    Parameters keep their memory, also if the step gives them a new ``.data``.
    """
    is_torchs = is_torchs_own(optimizer)
    own_step: Callable[[], object] = optimizer.step
    if is_torchs:
        step = inspect.unwrap(type(optimizer).step, stop=lambda step: not hasattr(step, "hooked"))
        own_step = partial(step, optimizer)
        direct = direct_step(optimizer, own_step)
        if direct is not None:
            return direct
    if any(group.get("fused") for group in optimizer.param_groups):
        own_step = ordered_step(optimizer, own_step)
    return own_step if is_torchs else _in_same_memory(optimizer, own_step)


def _in_same_memory(optimizer: Optimizer, own_step: Callable[[], object]) -> Callable[[], None]:
    """The step; copies what it assigned to a parameter's ``.data`` into the parameter's memory,
    which the network reads.
    """

    def step() -> None:
        memory = []
        for group in optimizer.param_groups:
            memory += [(parameter, parameter.data) for parameter in group["params"]]
        own_step()
        for parameter, own in memory:
            if parameter.data_ptr() != own.data_ptr():
                own.copy_(parameter.data)
                parameter.data = own

    return step


def is_recordable_optimizer(optimizer: Optimizer) -> bool:
    """Whether a CUDA graph can record its steps: torch's own code that keeps no number in Python,
    or a class that declares ``recordable = True``.
    """
    if getattr(optimizer, "recordable", False):
        return True
    keeps_tensors = type(optimizer) is torch.optim.SGD or "capturable" in optimizer.defaults
    return keeps_tensors and is_torchs_own(optimizer)


def starts_at_zero(optimizer: Optimizer) -> bool:
    """Whether the optimizer's first step equals a step from a state of zeros.

    This holds for Adam, and for SGD without dampening.
    """
    kind = type(optimizer)
    if not is_torchs_own(optimizer):
        return False
    if kind is torch.optim.SGD:
        return not optimizer.defaults["dampening"]
    return kind in (torch.optim.Adam, torch.optim.AdamW)
