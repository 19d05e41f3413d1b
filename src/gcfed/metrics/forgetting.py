"""What clients forget of each other's data in local training: FedGC's Figure 7 (gradient constraint, A.10).

With w the broadcast model, w_k what client k of the cohort S makes of it, and L(·, D_i) the mean loss on the data of
client i of the same cohort:

=====================  =========================================================  =============
``forgetting/before``  L(w, D), D being the data of all i together                equation 34
``forgetting/after``   mean over k and i of L(w_k, D_i)                           equation 35
``forgetting/own``     mean over k of L(w_k, D_k): what training gains at home
``forgetting/others``  mean over k and i ≠ k: what it costs elsewhere
=====================  =========================================================  =============

The paper's clients all take part; of a smaller cohort the data of its members stand for those of all. Samples come
without augmentation, networks in evaluation mode, and the terms of methods do not enter. A measured round costs
|S| + 1 passes over the drawn samples.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import AT_ONCE, OwnNumbers, client_state, device_of, drawn
from gcfed.utils.checked import Count, checked
from gcfed.utils.rng import generator


@checked
@dataclass(eq=False)
class Forgetting(OwnNumbers):
    """Adds ``forgetting/*`` to the rows of metrics; a client with a loss that is not finite is left out.

    Args:
        every: rounds between two measurements.
        samples: of each client, drawn anew in each measured round; null: all that it has.
    """

    every: Count = 10
    samples: Count | None = 200

    name = "forgetting"
    sees_cohort = True
    columns = ("forgetting/before", "forgetting/after", "forgetting/own", "forgetting/others")

    def on_download(self, download: Download) -> None:
        self._before: Tensor | None = None

    def measure(self, stack: ClientStack, client: int, download: Download) -> Tensor:
        if self._before is None:
            chosen = [self._draw(int(i), download) for i in download.cohort]
            sizes = [len(samples) for samples in chosen]
            owner, device = np.repeat(np.arange(len(chosen)), sizes), device_of(stack.full)
            self._index, self._owner = (torch.as_tensor(a, device=device) for a in (np.concatenate(chosen), owner))
            sums = self._sums_of(stack, stack.start, len(chosen))
            weight = self.data.sizes(download.cohort) / sizes  # a draw stands for all
            loss, labels = (sums * torch.as_tensor(weight, device=sums.device)).sum(1)
            self._before = loss / labels
        losses, labels = self._sums_of(stack, client_state(stack, client), len(download.cohort))
        losses = losses / labels
        own = int(np.flatnonzero(download.cohort == stack.clients[client])[0])
        others = torch.cat([losses[:own], losses[own + 1 :]])  # of a cohort of one: nobody, whose mean is NaN
        values = torch.stack([self._before, losses.mean(), losses[own], others.mean()])
        return torch.where(losses.isfinite().all(), values, torch.nan)

    def _draw(self, client: int, download: Download) -> np.ndarray:
        """Indices of the samples that stand for a client's data."""
        rng = generator(download.seed, "forgetting", download.round, client)
        return drawn(self.data.client(client), self.samples, rng)

    def _sums_of(self, stack: ClientStack, state: Params, cohort: int) -> Tensor:
        """One network's losses on the drawn samples of each client, summed, and the number of labels, ``[2, |S|]``."""
        sums = torch.zeros(2, cohort, dtype=torch.float64, device=self._index.device)
        for index, owner in zip(self._index.split(AT_ONCE), self._owner.split(AT_ONCE), strict=True):
            x, y = self.data.fetch(index, None)
            losses = stack.task.losses(functional_call(stack.net, state, (x,)), y)
            per_sample = [t.double().reshape(len(owner), -1).sum(1) for t in (losses, stack.task.real(y))]
            sums.index_add_(1, owner, torch.stack(per_sample))
        return sums
