"""How well the clients of a round do on their own training data, before and after local training.

What local training gains at home; compared with ``test/acc`` it shows what the global model keeps of it. FedGC
(gradient constraint, A.10) reads forgetting from the same losses. Samples come without augmentation, networks in
evaluation mode, and neither the terms of methods nor their calibration of the logits enter.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from gcfed.federated.messages import Download
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import AT_ONCE, OwnNumbers, client_state, device_of
from gcfed.utils.checked import Count, checked


@checked
@dataclass(eq=False)
class Clients(OwnNumbers):
    """Adds ``clients/{acc,loss}_{before,after}``: the mean over the cohort of each client's own.

    A label of padding in a sequence counts for nothing; a client whose loss is not finite is left out of all four.
    """

    every: Count = 10

    name = "clients"
    needs_classes = True
    columns = ("clients/acc_before", "clients/loss_before", "clients/acc_after", "clients/loss_after")

    def samples(self, client: int) -> np.ndarray:
        """The indices of the samples on which a client is looked at."""
        return self.data.client(client)

    def measure(self, stack: ClientStack, client: int, download: Download) -> Tensor:
        networks = (stack.start, client_state(stack, client))
        index = torch.as_tensor(self.samples(int(stack.clients[client])), device=device_of(stack.start))
        sums = torch.zeros(len(self.columns), dtype=torch.float64, device=index.device)
        labels = torch.zeros_like(sums[0])
        for part in index.split(AT_ONCE):
            x, y = self.data.fetch(part, None)
            labels += (y >= 0).sum()
            numbers = []
            for state in networks:
                logits = functional_call(stack.net, state, (x,))
                numbers += [(logits.argmax(-1) == y).sum(), stack.task.losses(logits, y).sum()]
            sums += torch.stack([n.double() for n in numbers])
        return torch.where(sums.isfinite().all(), sums / labels, torch.nan)
