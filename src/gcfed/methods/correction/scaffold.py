"""Control variates that cancel client drift: SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1,
option II).

    local step        g − c_k + c
    client's variate  c_k⁺ = c_k − c + (w₀ − w_k) / (τ_k η)
    server's variate  c⁺ = c + (|S|/N) · mean_{k∈S} (c_k⁺ − c_k)

So c is the mean of all c_k, unless a round is left out because its mean is not finite. Clients
send Δ_k and c_k⁺ − c_k. The server's learning rate is the paper's global one. c_k includes weight
decay, because torch's SGD adds it to the gradient.
"""

from collections.abc import Mapping
from typing import Any

import torch

from gcfed.federated.parts import (
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    KeptState,
    Method,
    Params,
    Prepared,
    Received,
    Setup,
    Upload,
    like_trained,
)
from gcfed.methods.estimates import gradients_beyond, step_counter
from gcfed.methods.requirements import full_uploads, local_sgd, uniform_weights
from gcfed.methods.shared_tensors import SharedTensors
from gcfed.utils.checked import checked


@checked
class Scaffold(Method):
    """Adds c − c_k to each client's gradients and keeps both variates up to date.

    Args:
        momentum_correction: divide w₀ − w_k by :func:`~gcfed.methods.estimates.effective_steps`
            instead of τ_k, because local momentum moves a client further. Without momentum both are
            equal. False: the paper's rule as printed.
    """

    def __init__(self, *, momentum_correction: bool = True) -> None:
        super().__init__(ControlVariates(momentum_correction), MeanVariate())


class ControlVariates(ClientPart):
    recordable = "run"
    facts = {Fact.CORRECTS_DRIFT}
    needs = [
        local_sgd("it computes a client's mean gradient from w₀ − w_k", momentum=True),
        full_uploads("its control variates would still be sent in full"),
    ]
    keeps = {"scaffold": KeptState(like_trained)}

    def __init__(self, momentum_correction: bool) -> None:
        self.momentum_correction = momentum_correction

    def bind(self, setup: Setup) -> None:
        self.count = step_counter(setup.local_optimizer_probe)

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        kept = own["scaffold"]
        return {name: mean - kept[name] for name, mean in download.extra["scaffold"].items()}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        torch._foreach_add_(*stack.with_grads(stack.prepared[self]))

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        steps = self.count(upload.num_steps) if self.momentum_correction else upload.num_steps
        known = download.extra["scaffold"]
        upload.send("scaffold", gradients_beyond(known, upload, steps * download.lr))

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        """A client whose upload does not count keeps its old c_k, so that c stays the mean."""
        return {"scaffold": own.add("scaffold", upload.extra["scaffold"], upload.finite)}


class MeanVariate(SharedTensors):
    """Sends c, and adds the mean change that clients report in ``message``."""

    needs = [uniform_weights("c is the plain mean of the clients' variates")]

    def __init__(self, message: str = "scaffold") -> None:
        super().__init__(message)

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        change = list(self.trained(round.extra_means[self.message]).values())
        share = round.num_finite / round.num_clients
        torch._foreach_add_(list(self.shared.values()), change, alpha=share)
