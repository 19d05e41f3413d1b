"""Control variates that cancel client drift: SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1, option II).

    local step        g − c_k + c
    client's variate  c_k⁺ = c_k − c + (w₀ − w_k) / (τ_k η)
    server's variate  c⁺ = c + (|S|/N) · mean_{k∈S} (c_k⁺ − c_k)

So c is the mean of all c_k at any time. Clients send Δ_k and c_k⁺ − c_k. The server's learning rate is the paper's
global one. Weight decay is part of the gradient that c_k estimates, since torch's SGD adds it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gcfed.federated.method import (
    ClientPart,
    ClientStack,
    Download,
    Kept,
    Method,
    Own,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
    like_trained,
)
from gcfed.federated.stack import per_client
from gcfed.methods.requirements import full_uploads, local_sgd, uniform_weights
from gcfed.optim.partial import probe_optimizer
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device


@checked
class Scaffold(Method):
    """Adds c − c_k to each client's gradients and keeps both variates up to date.

    Args:
        momentum_correction: divide w₀ − w_k by :func:`effective_steps` in place of τ_k, since local momentum carries a
            client further than τ_k plain steps; without momentum the two are equal. False: the paper's rule as printed.
    """

    def __init__(self, *, momentum_correction: bool = True) -> None:
        super().__init__(ControlVariates(momentum_correction), MeanVariate())


class ControlVariates(ClientPart):
    recordable = "run"
    facts = {"corrects drift"}
    needs = [
        local_sgd("it reads a client's mean gradient off w₀ − w_k", momentum=True),
        full_uploads("its control variates would still travel in full"),
    ]
    message = "scaffold"
    keeps = {"scaffold": Kept(like_trained)}

    def __init__(self, momentum_correction: bool) -> None:
        self.momentum_correction = momentum_correction

    def validate(self, setup: Setup) -> None:
        settings = probe_optimizer(setup.solver.optimizer).defaults
        if settings["momentum"] and settings["dampening"]:
            raise ValueError(
                f"client.optimizer.dampening={settings['dampening']} does not go with {self.title}, whose step count "
                "knows momentum without dampening only: set it to 0."
            )
        self.momentum, self.nesterov = settings["momentum"], settings["nesterov"]

    def prepare(self, stack: ClientStack, own: Own, download: Download) -> Params:
        control = download.extra["scaffold"]
        correction = torch._foreach_neg(list(own["scaffold"].values()))
        torch._foreach_add_(correction, list(control.values()))
        return dict(zip(control, correction, strict=True))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        torch._foreach_add_(*stack.with_grads(stack.prepared[self]))

    def send(self, upload: Upload, own: Own, download: Download) -> None:
        steps = upload.num_steps
        if self.momentum_correction:
            steps = effective_steps(steps, self.momentum, nesterov=self.nesterov)
        change = gradients_beyond(download.extra["scaffold"], upload, steps * download.lr)
        upload.send("scaffold", own.change("scaffold", change))  # of what is kept, so that c stays the mean of that

    def keep(self, upload: Upload, own: Own, download: Download) -> Mapping[str, Params]:
        """Where an upload does not count, its client keeps the old c_k, so that c stays their mean."""
        return {"scaffold": own.add("scaffold", upload.extra["scaffold"], upload.finite)}


class MeanVariate(ServerPart):
    needs = [uniform_weights("c is the plain mean of the clients' variates")]
    message = "scaffold"

    def on_broadcast(self, download: Download, round: Round) -> None:
        self.control = self.server_state("c", {name: round.start[name] for name in self.trained_names})
        download.extra[self.message] = self.control

    def uploads(self, round: Round) -> dict[str, Params]:
        return {self.message: self.control}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        change = [round.received[self.message][name] for name in self.trained_names]
        torch._foreach_add_(list(self.control.values()), change, alpha=round.num_finite / round.num_clients)


def gradients_beyond(known: Params, upload: Upload, distance: np.ndarray) -> Params:
    """By how much a client's mean local gradient, −Δ_k / ``distance``, exceeds what is known of it.

    Args:
        known: name → ``[*shape]`` or ``[K, *shape]``.
        distance: τ_k η, the lengths of a client's steps together, ``[K]``.
    """
    like = next(iter(known.values()))
    scale = on_device(-1 / distance, like.device, like.dtype)
    deltas = {name: upload.delta[name] for name in known}
    return {name: (delta * per_client(scale, delta)).sub_(known[name]) for name, delta in deltas.items()}


def effective_steps(steps: np.ndarray, momentum: float, *, nesterov: bool = False) -> np.ndarray:
    """How many plain steps lead as far along a constant gradient as these with momentum ρ, ``[K] → [K]``.

    ``(τ − ρ (1 − ρ^τ) / (1 − ρ)) / (1 − ρ)``, the sum of τ velocities; a Nesterov step is g + ρ v.
    """
    rho = momentum
    velocities = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return steps + rho * velocities if nesterov else velocities
