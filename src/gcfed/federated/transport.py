"""The seam between the server's program and the clients': an object that takes a download and yields uploads.

The server's program cannot tell one transport from another. It also asks it who will come back at all.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.solver import LocalSolver

Shapes = Callable[[], Mapping[str, Params]]
"""Tells what a client sends in the present round: ``"delta"`` and the names beside it → tensors like its own."""


class Transport(Protocol):
    """How messages travel between the server's program and the clients'."""

    remote: bool = False
    """Whether clients are on machines of their own: they vanish, know only themselves, and what the server's parts
    keep of them lies there."""
    missing: np.ndarray = np.zeros(0, dtype=np.int64)
    """Clients of the last ``fit`` that have not come back."""

    def start(self) -> None:
        """Called once before the first round; a checkpoint has been loaded."""
        return

    def arrivals(self, drawn: np.ndarray, round: int, seed: int) -> np.ndarray:
        """Those of the clients drawn for a round whose uploads will come, ``[K]``, in their order."""

    def steps(self, clients: np.ndarray, round: int, seed: int) -> np.ndarray:
        """Local steps that these clients do in a round, ``[K]``."""

    def fit(self, download: Download, clients: np.ndarray) -> Iterator[Upload]:
        """Local training of these clients: their uploads, K at a time, those that this process trains."""

    def rehearse(
        self, download: Download, clients: np.ndarray, solver: LocalSolver | None = None, here: bool = False
    ) -> Iterator[Upload]:
        """What these clients would send, each for itself; they keep nothing of it, and nothing is measured.

        They train by ``solver`` in place of the run's; ``here``: all of them on this process, which asks alone.
        """

    def reply(self, reply: Mapping[str, Params], download: Download) -> None:
        """Tells the clients of a round something when it is over."""

    def test(self, model: Callable[[], Params]) -> Mapping[str, tuple[float, float]] | None:
        """A test by the clients of the model, a copy of which ``model`` makes: column → mean score and the samples
        behind it; None: the server tests.
        """
        return None
