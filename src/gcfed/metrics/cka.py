"""Layer-wise similarity of the clients' networks to the global one: linear CKA.

Kornblith et al., ICML 2019, eq. 3 with linear kernels: for centred representations X, Y of the same samples
``CKA = ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖)`` (Frobenius norms), 1 where they agree up to rotation and scale. GC-Fed's Figure 7
averages it over the clients of a round, layer by layer.
"""

from typing import Any

import torch
from torch import Tensor

from gcfed.federated.forward import Params, Swap, Tap
from gcfed.federated.messages import Download
from gcfed.federated.method import Setup
from gcfed.federated.stack import ClientStack
from gcfed.methods.requirements import has_part
from gcfed.metrics.base import ClientMetric, client_state
from gcfed.utils.number import number
from gcfed.utils.rng import generator


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA of two representations of the same samples, ``[n, …]`` each → a number in [0, 1].

    NaN where one of them is the same for all samples.
    """
    x, y = (t.flatten(1) - t.flatten(1).mean(0) for t in (x, y))
    if max(x.shape[1], y.shape[1]) > len(x):  # ‖XᵀY‖² = ⟨XXᵀ, YYᵀ⟩: the smaller matrices
        xx, yy = (t @ t.T for t in (x, y))
        cross = (xx * yy).sum()
    else:
        xx, yy, cross = x.T @ x, y.T @ y, (x.T @ y).square().sum()
    return cross / (xx.norm() * yy.norm())


class CKA(ClientMetric):
    """Adds ``cka/<stage>`` for each of the network's ``stages()``: similarity of client and broadcast model, averaged.

    Args:
        every: rounds between two measurements.
        samples: number of test samples on which they are compared, drawn once by the run's seed.

    Raises:
        ValueError: a number below 1; at ``validate``, a network without ``stages()``.
    """

    name = "cka"

    def __init__(self, every: int = 10, samples: int = 256) -> None:
        super().__init__(every)
        self.samples = number("metrics.cka.samples", samples, 1, whole=True)
        self._probe: Tensor | None = None

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        net: Any = setup.module.net
        if not has_part(net, "stages"):
            raise ValueError(
                f"metrics=cka needs a network with stages(), which {type(net).__name__} has not: choose another model, "
                "or leave cka out of metrics."
            )
        self.data, self.network = setup.data, Tap(net, features=False, stages=True)
        self.columns = tuple(f"cka/{stage}" for stage in net.stages())

    def on_download(self, download: Download) -> None:
        self._broadcast: list[Tensor] | None = None

    def measure(self, stack: ClientStack, client: int, download: Download) -> Tensor:
        if self._broadcast is None:
            self._broadcast = self.stages(stack.start, download.seed)
        pairs = zip(self._broadcast, self.stages(client_state(stack, client), download.seed), strict=True)
        return torch.stack([linear_cka(theirs, own).double() for theirs, own in pairs])

    def stages(self, state: Params, seed: int) -> list[Tensor]:
        """The outputs of all stages on the probe, each ``[samples, …]``."""
        if self._probe is None:
            total = self.data.num_test
            chosen = generator(seed, "cka").choice(total, min(self.samples, total), replace=False)
            self._probe = torch.cat([self.data.fetch_test((i, i + 1))[0] for i in sorted(chosen.tolist())])
        with Swap(self.network.net).holding(state):
            _, *stages = self.network(self._probe)
        return stages
