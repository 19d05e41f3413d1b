"""The proximal term μ/2 ‖w − w₀‖²: FedProx (Li et al. 2020, eq. 2).

The code adds the term's gradient directly. ``train/loss`` contains the task's loss only.
"""

from typing import Any

import torch

from gcfed.federated.parts import ClientPart, ClientStack, ClientStates, Download, Fact, Prepared
from gcfed.utils.checked import Weight, checked


@checked
class Proximal(ClientPart):
    """Adds μ (w − w₀) to each client's gradients, with the broadcast model w₀.

    Args:
        mu: μ, weight of the term. FedProx: 0.1 in GC-Fed's experiments. FedACG's paper writes
            β/2 ‖·‖², so μ is its β. For a β without the ½, μ = 2β.
    """

    recordable = "run"
    facts = {Fact.ANCHORS}

    def __init__(self, mu: Weight = 0.1) -> None:
        self.mu = mu

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        return {"anchor": stack.broadcast_model}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        grads, weights, anchor = stack.with_grads(stack.full, stack.prepared[self]["anchor"])
        torch._foreach_add_(grads, torch._foreach_sub(weights, anchor), alpha=self.mu)
