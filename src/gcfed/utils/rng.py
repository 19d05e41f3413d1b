"""Every draw of a run is a function of (seed, purpose, round, client), never of the order of execution."""

import zlib

import numpy as np


def _sequence(seed: int, purpose: str, ids: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *ids))


def generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A fresh NumPy generator for one purpose (``"shuffle"``, ``"cohort"``, …) and the ids that it depends on."""
    return np.random.Generator(np.random.Philox(_sequence(seed, purpose, ids)))


def torch_seed(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit seed for ``torch.manual_seed``, derived as in :func:`generator`."""
    return int(_sequence(seed, purpose, ids).generate_state(1, np.uint64)[0] >> 1)
