"""Random generators.

Each draw is a function of (seed, purpose, round, client), never of the order of execution.
"""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator

if TYPE_CHECKING:
    import torch


def _sequence(seed: int, purpose: str, ids: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *ids))


def generator(seed: int, purpose: str, *ids: int) -> Generator:
    """A fresh NumPy generator for one purpose (``"shuffle"``, ``"cohort"``, …) and the ids that it
    depends on.
    """
    return Generator(np.random.Philox(_sequence(seed, purpose, ids)))


def torch_seed(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit seed for ``torch.manual_seed``, derived as in :func:`generator`."""
    return int(_sequence(seed, purpose, ids).generate_state(1, np.uint64)[0] >> 1)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the global generators that a network may draw from: torch's, NumPy's and Python's."""
    import torch  # data sets are read without it

    # torch.manual_seed would queue a call, with its traceback, for every backend that this machine
    # lacks.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
