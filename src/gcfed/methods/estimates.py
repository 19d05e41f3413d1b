"""Estimates of a client's gradients from its update, and moves of a given length."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from gcfed.federated.parts import Params, Upload, client_norms, per_client
from gcfed.utils.device import on_device


def gradients_beyond(known: Params, upload: Upload, distance: np.ndarray) -> Params:
    """The mean local gradient of each client, −Δ_k / ``distance``, minus ``known``: name → ``[K,
    *shape]``.

    Args:
        known: gradients, each ``[*shape]`` or ``[K, *shape]``.
        distance: τ_k η, the sum of a client's step sizes, ``[K]``.
    """
    like = next(iter(known.values()))
    scale = on_device(-1 / distance, like.device, like.dtype)
    beyond = {}
    for name, gradient in known.items():
        delta = upload.delta[name]
        beyond[name] = (delta * per_client(scale, delta).to(delta.dtype)).sub_(gradient)
    return beyond


def effective_steps(steps: np.ndarray, momentum: float, *, nesterov: bool = False) -> np.ndarray:
    """The number of plain steps that move as far along a constant gradient as these with momentum
    ρ, ``[K] → [K]``.

    ``(τ − ρ (1 − ρ^τ) / (1 − ρ)) / (1 − ρ)``, the sum of τ velocities; a Nesterov step is g + ρ v.
    """
    rho = momentum
    velocities = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    if nesterov:
        return steps + rho * velocities
    return velocities


def step_counter(sgd: Optimizer) -> Callable[[np.ndarray], np.ndarray]:
    """:func:`effective_steps` for the momentum of this SGD."""
    settings = sgd.defaults
    return partial(effective_steps, momentum=settings["momentum"], nesterov=settings["nesterov"])


def along(grads: Sequence[Tensor], length: float | Tensor) -> list[Tensor]:
    """Scales each client's gradient to the norm ``length``, a number or ``[n]``, over all its
    tensors.
    """
    scale = length / client_norms(grads).clamp(min=1e-12)
    return [grad * per_client(scale, grad).to(grad.dtype) for grad in grads]
