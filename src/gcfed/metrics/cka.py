"""Layer-wise similarity of the clients' networks to the global one: linear CKA.

Kornblith et al., ICML 2019, eq. 3 with linear kernels: for centred representations X, Y of the same samples
``CKA = ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖)`` (Frobenius norms), 1 where they agree up to rotation and scale. GC-Fed's Figure 7
averages it over the clients of a round, layer by layer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.forward import Params, Swap, Tap
from gcfed.federated.messages import Download
from gcfed.federated.method import Setup
from gcfed.federated.stack import ClientStack
from gcfed.methods.requirements import has_part
from gcfed.metrics.base import OwnNumbers, client_state, drawn, fetch_tests
from gcfed.utils.checked import Count, checked
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


@checked
@dataclass(eq=False)
class CKA(OwnNumbers):
    """Adds ``cka/<stage>`` for each of the network's ``stages()``: similarity of client and broadcast model, averaged.

    Args:
        every: rounds between two measurements.
        samples: number of test samples on which they are compared, drawn once by the run's seed.

    Raises:
        ValueError: at ``validate``, a network without ``stages()``.
    """

    every: Count = 10
    samples: Count = 256

    name = "cka"

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        net: Any = setup.module.net
        if not has_part(net, "stages"):
            raise ValueError(
                f"metrics=cka needs a network with stages(), which {type(net).__name__} has not: choose another model, "
                "or leave cka out of metrics."
            )
        self.network = Tap(net, features=False, stages=True)
        self._probe: Tensor | None = None
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
            chosen = drawn(np.arange(self.data.num_test), self.samples, generator(seed, "cka"))
            self._probe, _ = fetch_tests(self.data, chosen)
        with Swap(self.network.net).holding(state):
            _, *stages = self.network(self._probe)
        return stages
