"""What the parts of a run see of it before the first round."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gcfed.data.sampling import UniformSampler
from gcfed.federated.aggregate import Aggregator
from gcfed.federated.module import FederatedModule
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver
from gcfed.models.order import ForwardOrder, order_for_gc


@dataclass(frozen=True)
class Setup:
    """What each part sees of the run before the first round.

    Attributes:
        stores: hold the states of clients, and server parts' tables with a row per client.
        module: the global model and its server optimizer.
        parts: of all methods of the run, in the order of their hooks.
        rounds: R, the number of communication rounds.
        cohort: how many clients train in a round, at most. The sampler also draws
            ``participation.faults.extra``.
        transport: carries messages (``federated/stacks.py``). A server part may ask it what clients
            would send.
    """

    sampler: UniformSampler
    solver: LocalSolver
    aggregator: Aggregator
    stores: ClientStores
    data: Any
    module: FederatedModule
    parts: Sequence[Any]
    rounds: int
    cohort: int
    transport: Any

    @functools.cached_property
    def names(self) -> list[str]:
        """The parameters that are trained, in order."""
        return [name for name, p in self.module.net.named_parameters() if p.requires_grad]

    @functools.cached_property
    def forward_order(self) -> ForwardOrder:
        """The order in which a forward pass uses the parameters."""
        return order_for_gc(self.module.net, self.data.input_shape)
