"""The interface of a transport, which carries messages between the server and the clients."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from gcfed.federated.messages import Download, Upload
from gcfed.federated.training.forward import Params
from gcfed.federated.training.solver import LocalSolver


class Expected(NamedTuple):
    """What a client sends in a round.

    Attributes:
        shapes: ``"delta"`` and each name of ``Upload.extra`` → tensors like those of one client.
        notes: name of a note → tensors like those of the note.
    """

    shapes: Mapping[str, Params]
    notes: Mapping[str, Params]


class Transport(Protocol):
    """Carries messages. Server and clients work in the same way with every transport."""

    remote: bool = False
    """Whether clients run on other machines, which may disappear and which keep the clients' states."""
    separate_clients: bool = False
    """Whether clients are built from the config a second time, without the callbacks."""
    own_data: bool = False
    """Whether the server does not know the clients' data."""
    missing: np.ndarray = np.zeros(0, dtype=np.int64)
    """Clients of the last ``fit`` that did not answer."""
    unasked: int = 0
    """How many of them were sent nothing."""

    def start(self) -> None:
        """Called once before the first round, after a checkpoint has been loaded."""
        return

    def planned(self, clients: np.ndarray) -> np.ndarray:
        """How many local steps are asked of these clients in a round, ``[K]``."""

    def fit(self, download: Download, clients: np.ndarray, expected: Expected) -> Iterator[Upload]:
        """Trains those of the clients that this process has, and yields their uploads, K at a time.

        Args:
            expected: the tensors of an upload. A transport to sites refuses other ones.
        """

    def rehearse(
        self, download: Download, clients: np.ndarray, solver: LocalSolver | None = None, here: bool = False
    ) -> Iterator[Upload]:
        """Yields what these clients would send. They keep nothing, and measurements do not see it.

        Args:
            solver: replaces the run's solver.
            here: train all of them on this process, because no other process calls it.
        """

    def reply(self, reply: Mapping[str, Params]) -> None:
        """Sends the server's reply to the clients of the round."""
