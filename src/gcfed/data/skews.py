"""Two more partitions that the literature uses: shards of sorted samples, and sizes that differ."""

from dataclasses import dataclass

import numpy as np

from gcfed.data.dealing import fill_up, log_gamma, softmax
from gcfed.data.partition import ALPHA, Partition, check_clients, check_one_label
from gcfed.utils.number import number
from gcfed.utils.rng import generator


@dataclass(frozen=True)
class Shards:
    """Each client holds ``shards`` shards, drawn at random, of the samples sorted by class: FedAvg's pathological split
    (McMahan et al., AISTATS 2017, with 100 clients and 2 shards of 300 images).

    Shards differ in size by one sample at most; one that lies where two classes meet has samples of both.
    """

    shards: int = 2

    def __post_init__(self) -> None:
        number("partition.shards", self.shards, 1, whole=True)

    def __call__(
        self, labels: np.ndarray, num_clients: int, *, seed: int, groups: np.ndarray | None = None
    ) -> Partition:
        check_one_label(labels)
        check_clients(len(labels), num_clients, self.shards, "partition.shards")
        rng, count = generator(seed, "partition"), num_clients * self.shards
        shuffled = rng.permutation(len(labels))
        by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
        owner_n = np.empty(len(labels), np.int64)
        owner_n[by_class] = (rng.permutation(count) // self.shards)[np.arange(len(labels)) * count // len(labels)]
        return Partition.from_owners(owner_n, num_clients)


@dataclass(frozen=True)
class DirichletSizes:
    """Unequal sizes, equal mixes: the clients' shares of the samples are one Dirichlet(α) draw over all clients, which
    samples is random ("quantity skew" in Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022).

    Clients below ``min_size`` are filled up from the largest. Every sample is assigned.
    """

    alpha: float
    min_size: int = 1

    def __post_init__(self) -> None:
        number("partition.alpha", self.alpha, *ALPHA)
        number("partition.min_size", self.min_size, 1, whole=True)

    def __call__(
        self, labels: np.ndarray, num_clients: int, *, seed: int, groups: np.ndarray | None = None
    ) -> Partition:
        check_clients(len(labels), num_clients, self.min_size)
        rng = generator(seed, "partition")
        cuts = np.cumsum(softmax(log_gamma(self.alpha, (num_clients,), rng)))
        ends = np.floor(cuts / cuts[-1] * len(labels)).astype(np.int64)
        owner_n = np.empty(len(labels), np.int64)
        owner_n[rng.permutation(len(labels))] = np.repeat(np.arange(num_clients), np.diff(ends, prepend=0))
        fill_up(owner_n, num_clients, self.min_size, rng)
        return Partition.from_owners(owner_n, num_clients)
