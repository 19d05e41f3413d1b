"""The proximal term μ/2 ‖w − w₀‖², which keeps clients near the broadcast model.

FedProx (Li et al. 2020, eq. 2). State: none. Bytes: those of the model. The term enters as its gradient μ (w − w₀), so
no graph is built for it; ``train/loss`` reports the task's loss alone.
"""

import torch
from lightning.pytorch import LightningModule, Trainer

from gcfed.federated.method import ClientPart
from gcfed.utils.number import number


class Proximal(ClientPart):
    """Adds μ (w − w₀) to each client's gradients, where w₀ is what the server broadcast.

    Args:
        mu: μ ≥ 0. FedProx: 0.1 in GC-Fed's experiments. FedACG's β without the ½ is μ = 2β.

    Raises:
        ValueError: μ is negative.
    """

    graphable = True
    anchors = True

    def __init__(self, mu: float = 0.1) -> None:
        self.mu = number("methods.proximal.mu", mu, 0)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stack = self.stack
        names, grads = zip(*stack.named_grads(), strict=True)
        with torch.no_grad():
            drift = torch._foreach_sub([stack.leaves[n] for n in names], [stack.start[n] for n in names])
            torch._foreach_add_(list(grads), drift, alpha=self.mu)
