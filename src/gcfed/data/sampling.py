"""Cohorts: which clients take part in a round, as a pure function of (round, num_clients, seed)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from gcfed.utils.checked import Count, Share, checked
from gcfed.utils.rng import generator


class ClientSampler(Protocol):
    """``sampler(round, num_clients, seed)``: the cohort's client ids, int64 [K], ascending and distinct."""

    per_round: int

    def __call__(self, round: int, num_clients: int, seed: int) -> np.ndarray: ...

    def validate(self, num_clients: int) -> None:
        """Raise ValueError if this sampler cannot serve a population of ``num_clients``."""
        ...


def cohort_size(per_round: int | float, num_clients: int) -> int:
    """``participation.per_round`` as a number of clients: a value below 1 is a share of all, at least one client."""
    if isinstance(per_round, float) and 0 < per_round < 1:
        return max(1, round(per_round * num_clients))
    if isinstance(per_round, bool) or not isinstance(per_round, int) or per_round < 1:
        raise ValueError(f"participation.per_round={per_round} must be a whole number, at least 1, or a share below 1.")
    return per_round


@checked
@dataclass(frozen=True)
class UniformSampler:
    """``per_round`` clients, uniform without replacement. Costs O(per_round), whatever the population."""

    per_round: Count

    def validate(self, num_clients: int) -> None:
        if self.per_round > num_clients:
            raise ValueError(
                f"participation.per_round={self.per_round} exceeds participation.num_clients={num_clients}: "
                "a cohort, with faults.extra, holds a client at most once"
            )

    def __call__(self, round: int, num_clients: int, seed: int) -> np.ndarray:
        self.validate(num_clients)
        # Given a number instead of an array, NumPy draws by Floyd's algorithm and never lists the population.
        cohort = generator(seed, "cohort", round).choice(num_clients, self.per_round, replace=False, shuffle=False)
        return np.sort(cohort)


@checked
@dataclass(frozen=True)
class DynamicPopulation(UniformSampler):
    """A population that changes while it trains (FedACG, Table 3).

    At first ``live`` of the ``num_clients`` clients take part. Every ``every`` rounds each of them is replaced, with
    ``replace_probability``, by a client that was not live; it may come back later. If fewer clients wait than are to be
    replaced, only that many are. The cohort is uniform over the live. The live set of round r is replayed from the
    first round on, in r / every steps, and cached until it changes.
    """

    live: Count = 250
    every: Count = 100
    replace_probability: Share = 0.5

    def validate(self, num_clients: int) -> None:
        super().validate(num_clients)
        live, per_round = f"participation.sampler.live={self.live}", f"participation.per_round={self.per_round}"
        if self.live > num_clients:
            raise ValueError(f"{live} exceeds participation.num_clients={num_clients}: lower it")
        if self.per_round > self.live:
            raise ValueError(f"{per_round} exceeds {live}: a cohort is drawn from the live clients")

    def live_clients(self, round: int, num_clients: int, seed: int) -> np.ndarray:
        """Ids of the clients that can be drawn in ``round``, int64 [live], ascending and read-only."""
        return _live_clients(self.live, self.replace_probability, num_clients, seed, round // self.every)

    def __call__(self, round: int, num_clients: int, seed: int) -> np.ndarray:
        self.validate(num_clients)
        return self.live_clients(round, num_clients, seed)[super().__call__(round, self.live, seed)]


@lru_cache(maxsize=8)
def _live_clients(live: int, probability: float, num_clients: int, seed: int, stage: int) -> np.ndarray:
    ids = np.sort(generator(seed, "population", 0).choice(num_clients, live, replace=False, shuffle=False))
    for step in range(1, stage + 1):
        rng = generator(seed, "population", step)
        leaving = np.flatnonzero(rng.random(live) < probability)
        leaving = rng.permutation(leaving)[: num_clients - live]
        # The newcomers by their rank among those not live; a rank becomes an id by stepping over the live ids below it.
        rank = rng.choice(num_clients - live, len(leaving), replace=False) if len(leaving) else leaving
        newcomers = rank + np.searchsorted(ids - np.arange(live), rank, side="right")
        ids[leaving] = newcomers
        ids.sort()
    ids.flags.writeable = False
    return ids
