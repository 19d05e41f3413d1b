"""How messages travel between the server's program and the clients'."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.solver import LocalSolver


class Expected(NamedTuple):
    """What a round expects of a client.

    Attributes:
        shapes: ``"delta"`` and the names of what goes beside it → tensors like those of one client.
        notes: names of notes → tensors like those of a note.
    """

    shapes: Mapping[str, Params]
    notes: Mapping[str, Params]


class Transport(Protocol):
    """The seam between the server's program and the clients', which cannot tell one transport from another."""

    remote: bool = False
    """Whether clients are on machines of their own: they vanish, know only themselves, and what the server's parts
    keep of them lies there."""
    apart: bool = False
    """Whether clients are in another process, with which ends what they keep in no store."""
    own_data: bool = False
    """Whether clients have data that the server does not know, so that its partition describes nobody."""
    missing: np.ndarray = np.zeros(0, dtype=np.int64)
    """Clients of the last ``fit`` that have not come back."""
    unasked: int = 0
    """How many of the missing were sent nothing."""

    def start(self) -> None:
        """Called once before the first round; a checkpoint has been loaded."""
        return

    def planned(self, clients: np.ndarray) -> np.ndarray:
        """Local steps that are asked of these clients in a round, ``[K]``."""

    def fit(self, download: Download, clients: np.ndarray, expected: Expected) -> Iterator[Upload]:
        """Local training of these clients: their uploads, K at a time, those that this process trains.

        A transport to other machines refuses messages that are not as ``expected``.
        """

    def rehearse(
        self, download: Download, clients: np.ndarray, solver: LocalSolver | None = None, here: bool = False
    ) -> Iterator[Upload]:
        """What these clients would send, each for itself; they keep nothing of it, and nothing is measured.

        They train by ``solver`` in place of the run's; ``here``: all of them on this process, which asks alone.
        """

    def reply(self, reply: Mapping[str, Params]) -> None:
        """Tells the clients of a round something when it is over."""
