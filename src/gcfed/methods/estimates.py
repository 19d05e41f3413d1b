"""Estimates of a client's gradients from its update."""

from collections.abc import Callable
from functools import partial

import numpy as np

from gcfed.federated.messages import Upload
from gcfed.federated.training.forward import Params
from gcfed.federated.training.stack import per_client
from gcfed.optim.partial import MakeOptimizer, probe_optimizer
from gcfed.utils.device import on_device


def gradients_beyond(known: Params, upload: Upload, distance: np.ndarray) -> Params:
    """The mean local gradient of each client, −Δ_k / ``distance``, minus ``known``.

    Args:
        known: name → ``[*shape]`` or ``[K, *shape]``.
        distance: τ_k η, the sum of a client's step sizes, ``[K]``.
    """
    like = next(iter(known.values()))
    scale = on_device(-1 / distance, like.device, like.dtype)
    deltas = {name: upload.delta[name] for name in known}
    scaled = {name: delta * per_client(scale, delta).to(delta.dtype) for name, delta in deltas.items()}
    return {name: t.sub_(known[name]) for name, t in scaled.items()}


def effective_steps(steps: np.ndarray, momentum: float, *, nesterov: bool = False) -> np.ndarray:
    """The number of plain steps that move as far along a constant gradient as these with momentum ρ, ``[K] → [K]``.

    ``(τ − ρ (1 − ρ^τ) / (1 − ρ)) / (1 − ρ)``, the sum of τ velocities; a Nesterov step is g + ρ v.
    """
    rho = momentum
    velocities = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return steps + rho * velocities if nesterov else velocities


def step_counter(sgd: MakeOptimizer) -> Callable[[np.ndarray], np.ndarray]:
    """:func:`effective_steps` for the momentum of the clients' SGD."""
    settings = probe_optimizer(sgd).defaults
    return partial(effective_steps, momentum=settings["momentum"], nesterov=settings["nesterov"])
