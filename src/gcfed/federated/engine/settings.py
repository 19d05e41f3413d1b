"""The settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from gcfed.federated.engine.round_row import columns_of_run
from gcfed.federated.parts.part import Aggregator
from gcfed.federated.parts.transport import Transport
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.schedule import Participation


@dataclass(eq=False, kw_only=True)
class RunSettings:
    """What a run does, whatever its data, its network and its methods are."""

    sampler: Participation
    solver: LocalSolver
    aggregator: Aggregator
    rounds: int  # R, the number of communication rounds
    seed: int  # every draw derives from it
    # rounds between two tests of the global model; the last round is always tested
    eval_every: int = 1
    # the default has a temporary folder and no checkpoints
    stores: ClientStores = field(default_factory=ClientStores)
    faults: Faults = field(default_factory=Faults)
    clock: Clock = field(default_factory=Clock)
    # partial of a transport's class, which takes the simulation in memory; None: the simulation
    federation: partial[Transport] | None = None

    def settings(self) -> RunSettings:
        """The present settings, for a run that does not see later ones."""
        return RunSettings(**{item.name: getattr(self, item.name) for item in fields(RunSettings)})

    @property
    def columns(self) -> list[str]:
        """The columns of its rows, without columns of the test and of methods."""
        return columns_of_run(self.sampler, self.faults, self.clock, remote=self.is_remote)

    @property
    def is_remote(self) -> bool:
        """Whether clients run on other machines. It is known before the run is bound, because a
        table asks for the columns of runs that it does not build.
        """
        if self.federation is None:
            return False
        transport: Any = self.federation.func  # a class
        return bool(transport.remote)
