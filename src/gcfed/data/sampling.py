"""Which clients take part in a round: a pure function of (round, num_clients, seed)."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gcfed.utils.checked import Count, Share, checked
from gcfed.utils.rng import generator


def cohort_size(per_round: int | float, num_clients: int) -> int:
    """``participation.per_round`` as a number of clients.

    A value below 1 is a share of all clients, at least one.
    """
    if isinstance(per_round, float) and 0 < per_round < 1:
        return max(1, round(per_round * num_clients))
    if isinstance(per_round, bool) or not isinstance(per_round, int) or per_round < 1:
        raise ValueError(
            f"participation.per_round={per_round} must be a whole number, at least 1, or a share"
            " below 1."
        )
    return per_round


@checked
@dataclass(frozen=True)
class UniformSampler:
    """``per_round`` clients, uniform without replacement.

    The cost is O(per_round) for any population.

    ``sampler(round, num_clients, seed)`` returns the ids of the cohort, int64 [K], ascending and
    distinct.
    """

    per_round: Count  # size of a cohort; with PoissonSampler its mean

    def validate(self, num_clients: int) -> None:
        """Raises ValueError if this sampler cannot draw from ``num_clients`` clients; called before
        the first round.
        """
        if self.per_round > num_clients:
            drawn = f"participation.per_round={self.per_round}"
            raise ValueError(
                f"{drawn} exceeds participation.num_clients={num_clients}: lower it (or"
                " faults.extra)."
            )

    def __call__(self, round: int, num_clients: int, seed: int) -> np.ndarray:
        # Given a number instead of an array, NumPy draws by Floyd's algorithm and never lists the
        # population.
        rng = generator(seed, "cohort", round)
        return np.sort(rng.choice(num_clients, self.per_round, replace=False, shuffle=False))


@dataclass(frozen=True)
class PoissonSampler(UniformSampler):
    """Each client with probability ``per_round`` / N, independently of the others.

    A round may have no client.
    """

    def __call__(self, round: int, num_clients: int, seed: int) -> np.ndarray:
        rng = generator(seed, "cohort", round)
        size = rng.binomial(num_clients, self.per_round / num_clients)
        return np.sort(rng.choice(num_clients, size, replace=False, shuffle=False))


@checked
@dataclass(frozen=True)
class DynamicPopulation(UniformSampler):
    """A population that changes during training (FedACG, Table 3).

    ``live`` of the ``num_clients`` clients take part at first. After each ``every`` rounds, each of
    them is replaced with ``replace_probability`` by one that was not live, if there is one. The
    cohort is uniform over the live clients.
    """

    live: Count = 250
    every: Count = 100
    replace_probability: Share = 0.5

    def validate(self, num_clients: int) -> None:
        super().validate(num_clients)
        live, per_round = (
            f"participation.sampler.live={self.live}",
            f"participation.per_round={self.per_round}",
        )
        if self.live > num_clients:
            raise ValueError(f"{live} exceeds participation.num_clients={num_clients}: lower it")
        if self.per_round > self.live:
            raise ValueError(f"{per_round} exceeds {live}: cohorts are drawn from the live clients")

    def __call__(self, round: int, num_clients: int, seed: int) -> np.ndarray:
        live = _live_clients(
            self.live, self.replace_probability, num_clients, seed, round // self.every
        )
        return live[super().__call__(round, self.live, seed)]


@lru_cache(maxsize=8)
def _live_clients(
    live: int, probability: float, num_clients: int, seed: int, stage: int
) -> np.ndarray:
    """Ids of the clients that can be drawn, int64 [live], ascending and read-only, after ``stage``
    replacements.
    """
    ids = np.sort(
        generator(seed, "population", 0).choice(num_clients, live, replace=False, shuffle=False)
    )
    for step in range(1, stage + 1):
        rng = generator(seed, "population", step)
        leaving = rng.permutation(np.flatnonzero(rng.random(live) < probability))[
            : num_clients - live
        ]
        # Newcomers are drawn by rank among the clients that are not live. The live ids below turn a
        # rank into an id.
        rank = (
            rng.choice(num_clients - live, len(leaving), replace=False) if len(leaving) else leaving
        )
        ids[leaving] = rank + np.searchsorted(ids - np.arange(live), rank, side="right")
        ids.sort()
    ids.flags.writeable = False
    return ids
