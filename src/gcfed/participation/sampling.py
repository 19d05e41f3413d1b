"""Which clients take part in a round: a function of (round, num_clients, seed).

:class:`LossSampler` also knows the clients' losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from typing import ClassVar

import numpy as np

from gcfed.participation.schedule import ClientRecord, Sampler
from gcfed.utils.checked import Count, Inside, Positive, Share, Weight, checked
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator


def number_of_clients(value: int | float, num_clients: int, key: str) -> int:
    """A setting such as ``participation.per_round`` as a number of clients.

    A value below 1 is a share of all clients, at least one. Raises Refusal for anything that is
    neither, and names the key.
    """
    if isinstance(value, float) and 0 < value < 1:
        return max(1, round(value * num_clients))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refusal(
            f"{key}={value} is neither a whole number of clients nor a share below 1: set"
            f" {key}={num_clients} for all clients."
        )
    return value


def outside(taken: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The ids with these ranks among all ids that are not taken, int64 ``[K]``.

    So a draw among the clients that are not taken never lists them.

    Args:
        taken: ids, ascending and distinct.
        rank: 0 for the smallest id that is not taken.
    """
    free_below = taken - np.arange(len(taken))  # how many smaller ids are free, for each taken id
    return rank + np.searchsorted(free_below, rank, side="right")


@checked
@dataclass(frozen=True)
class UniformSampler(Sampler):
    """``per_round`` clients, uniform without replacement.

    The cost is O(per_round) for any population.
    """

    @property
    def can_draw_among_available(self) -> bool:
        return type(self) is UniformSampler  # a subclass may know the clients by their ids

    def __call__(self, round_index: int, num_clients: int, seed: int) -> np.ndarray:
        # Given a number instead of an array, NumPy draws by Floyd's algorithm and never lists the
        # population.
        rng = generator(seed, "cohort", round_index)
        return np.sort(rng.choice(num_clients, self.per_round, replace=False, shuffle=False))


@checked
@dataclass(frozen=True)
class PoissonSampler(UniformSampler):
    """Each client with probability ``per_round`` / N, independently of the others.

    A round may have no client.
    """

    @property
    def most(self) -> int:
        """A number that a round exceeds with a probability below e⁻⁷⁰ (Bernstein's inequality)."""
        return ceil(self.per_round + 12 * sqrt(self.per_round) + 50)

    def __call__(self, round_index: int, num_clients: int, seed: int) -> np.ndarray:
        rng = generator(seed, "cohort", round_index)
        size = rng.binomial(num_clients, self.per_round / num_clients)
        return np.sort(rng.choice(num_clients, size, replace=False, shuffle=False))


class LossSampler(UniformSampler):
    """Chooses clients by the losses of their last training.

    So cohorts depend on the method and are no longer the same for all methods of a seed.
    """

    depends_on_losses: ClassVar[bool] = True

    def choose(
        self, round_index: int, num_clients: int, seed: int, known: Mapping[int, ClientRecord]
    ) -> np.ndarray:
        raise NotImplementedError

    def __call__(self, round_index: int, num_clients: int, seed: int) -> np.ndarray:
        return self.choose(round_index, num_clients, seed, {})


@checked
@dataclass(frozen=True)
class PowerOfChoice(LossSampler):
    """Of ``pool`` clients drawn uniformly, the ``per_round`` with the largest losses
    (π_rpow-d, Cho et al., AISTATS 2022, Section 4).

    The paper's π_pow-d asks all candidates for their present loss, and draws them in proportion to
    their samples. This variant uses the loss of a client's last training and costs nothing. Clients
    that have not trained come first.
    """

    pool: Count = 20

    def validate(self, num_clients: int) -> None:
        super().validate(num_clients)
        if not self.per_round <= self.pool <= num_clients:
            raise Refusal(
                f"participation.sampler.pool={self.pool} must be between"
                f" participation.per_round={self.per_round} and"
                f" participation.num_clients={num_clients}."
            )

    def choose(
        self, round_index: int, num_clients: int, seed: int, known: Mapping[int, ClientRecord]
    ) -> np.ndarray:
        # The pool is in a random order, so ties are broken at random.
        pool = generator(seed, "cohort", round_index).choice(num_clients, self.pool, replace=False)
        losses = np.full(self.pool, np.inf)
        for place, client in enumerate(pool.tolist()):
            if client in known:
                losses[place] = known[client].loss
        largest = np.argsort(-losses, kind="stable")[: self.per_round]
        return np.sort(pool[largest])


@checked
@dataclass(frozen=True)
class Oort(LossSampler):
    """Prefers clients with large losses, many samples and fast devices
    (Oort, Lai et al., OSDI 2021, Algorithm 1).

    A client's utility is √n · (its loss) + √(0.1 ln t / its last round), times
    (preferred / its seconds)^penalty if it took longer than ``preferred`` seconds. Most of the
    cohort is drawn in proportion to the utilities, among clients with at least ``cutoff`` times the
    utility of the last that would be taken. The others are drawn among clients that have not
    trained.

    The paper's utility is n · √(mean of squared losses) of the samples. The server knows the mean
    loss only, and √n keeps the largest clients from being drawn always. The paper's pacer, which
    lengthens ``preferred`` during a run, is not here.

    Attributes:
        explore: share of the cohort that has not trained yet, in the first round.
        explore_decay: factor on it per round.
        explore_least: its smallest value.
        preferred: T, seconds of a client that is not too slow; None: no client is.
        penalty: α, the exponent.
        cutoff: c.
    """

    explore: Share = 0.9
    explore_decay: Share = 0.98
    explore_least: Share = 0.2
    preferred: Positive | None = None
    penalty: Weight = 2.0
    cutoff: Inside = 0.95

    def choose(
        self, round_index: int, num_clients: int, seed: int, known: Mapping[int, ClientRecord]
    ) -> np.ndarray:
        random = generator(seed, "cohort", round_index)
        trained = np.array(sorted(known), dtype=np.int64)
        unseen = np.setdiff1d(np.arange(num_clients), trained)
        share = max(self.explore_least, self.explore * self.explore_decay**round_index)
        num_new = min(len(unseen), int(share * self.per_round + 0.5))
        # Too few clients have trained in the first rounds.
        num_new = max(num_new, self.per_round - len(trained))
        utilities = np.array([self.utility(known[k], round_index) for k in trained.tolist()])
        utilities -= min(utilities.min(initial=0.0), 0.0)  # a user's loss may be below 0
        best = self._draw_best(random, trained, utilities, self.per_round - num_new)
        new = random.choice(unseen, num_new, replace=False)
        return np.sort(np.concatenate([best, new]).astype(np.int64))

    def utility(self, client: ClientRecord, round_index: int) -> float:
        """How much the server wants a client."""
        value = np.sqrt(client.samples) * client.loss
        value += np.sqrt(0.1 * np.log(round_index + 1) / (client.round_index + 1))
        if self.preferred is not None and client.seconds > self.preferred:
            value *= (self.preferred / client.seconds) ** self.penalty
        return float(value)

    def _draw_best(
        self, random: np.random.Generator, clients: np.ndarray, utilities: np.ndarray, count: int
    ) -> np.ndarray:
        """``count`` of these clients, drawn in proportion to their utilities."""
        if count == 0:
            return np.zeros(0, dtype=np.int64)
        last_taken = np.sort(utilities)[-count]
        near = utilities >= self.cutoff * last_taken
        weights = np.maximum(utilities[near], 1e-12)  # losses may be 0
        return random.choice(clients[near], count, replace=False, p=weights / weights.sum())


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
        live = f"participation.sampler.live={self.live}"
        if self.live > num_clients:
            raise Refusal(f"{live} exceeds participation.num_clients={num_clients}: lower it")
        if self.per_round > self.live:
            raise Refusal(
                f"participation.per_round={self.per_round} exceeds {live}: cohorts are drawn from"
                " the live clients"
            )

    def __call__(self, round_index: int, num_clients: int, seed: int) -> np.ndarray:
        live = _live_clients(
            self.live, self.replace_probability, num_clients, seed, round_index // self.every
        )
        return live[super().__call__(round_index, self.live, seed)]


@lru_cache(maxsize=8)
def _live_clients(
    live: int, probability: float, num_clients: int, seed: int, stage: int
) -> np.ndarray:
    """Ids of the clients that can be drawn, int64 [live], ascending and read-only, after ``stage``
    replacements.
    """
    first = generator(seed, "population", 0)
    ids = np.sort(first.choice(num_clients, live, replace=False, shuffle=False))
    for step in range(1, stage + 1):
        rng = generator(seed, "population", step)
        leaving = rng.permutation(np.flatnonzero(rng.random(live) < probability))
        leaving = leaving[: num_clients - live]
        if not len(leaving):
            continue
        rank = rng.choice(num_clients - live, len(leaving), replace=False)
        ids[leaving] = outside(ids, rank)
        ids.sort()
    ids.flags.writeable = False
    return ids
