"""What the server asks of a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from gcfed.federated.protocol.messages import Download, Expected, Params, Upload
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver

NO_CLIENTS = np.zeros(0, dtype=np.int64)


class Outcome(NamedTuple):
    """How the clients of a round answered.

    Attributes:
        missing: ids of the clients that did not answer.
        num_unsent: number of clients that were sent nothing, because their site was not free.
    """

    missing: np.ndarray = NO_CLIENTS
    num_unsent: int = 0

    def answered(self, cohort: np.ndarray) -> np.ndarray:
        """The clients of the cohort that answered, ``[K]``."""
        if not len(self.missing):
            return cohort
        return np.setdiff1d(cohort, self.missing)


class Transport(Protocol):
    """Carries messages between the server and the clients. A simulation trains them in memory.

    Attributes:
        stores: the clients' states, as far as the server knows them.
        remote: whether clients run on other machines, which may disappear and which keep the
            clients' states.
        separate_clients: whether clients are built from the config a second time, without the
            callbacks.
        own_data: whether the server does not know the clients' data.
    """

    stores: ClientStores
    remote: bool
    separate_clients: bool
    own_data: bool

    def start(self) -> None:
        """Called once before the first round, after a checkpoint has been loaded."""

    def planned(self, clients: np.ndarray) -> np.ndarray:
        """How many local steps are asked of these clients in a round, ``[K]``."""

    def fit(
        self,
        download: Download,
        clients: np.ndarray,
        receive: Callable[[Upload], None],
        expected: Expected,
    ) -> Outcome:
        """Trains the clients that this process has. The processes share the work of the download's
        cohort.

        Args:
            clients: all or some of the cohort, ``[K]``.
            receive: called with the uploads of K clients at a time, in any order. Nobody else holds
                an upload, so its memory is free when ``receive`` drops it.
            expected: the tensors of an upload. A transport to sites refuses other tensors.
        """

    def rehearse(
        self,
        download: Download,
        clients: np.ndarray,
        solver: LocalSolver | None = None,
        here: bool = False,
    ) -> Iterator[Upload]:
        """Yields what these clients would send. They keep nothing, and measurements do not see it.

        Args:
            solver: replaces the run's solver.
            here: train all of them on this process, because no other process calls it.
        """

    def reply(self, reply: Mapping[str, Params]) -> None:
        """Sends the server's reply to the clients of the round."""

    def end_round(self) -> None:
        """Frees what a reply would need. Called at the end of every round."""
