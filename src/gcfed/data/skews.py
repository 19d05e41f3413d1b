"""Two more partitions that the literature uses: shards of sorted samples, and sizes that differ."""

from dataclasses import dataclass

import numpy as np

from gcfed.data.dealing import cut, fill_up, in_order, log_gamma, placed, softmax
from gcfed.data.partition import Alpha, Partitioner
from gcfed.utils.checked import Count, checked


@checked
@dataclass(frozen=True)
class Shards(Partitioner):
    """Each client holds ``shards`` shards, drawn at random, of the samples sorted by class: FedAvg's pathological split
    (McMahan et al., AISTATS 2017, with 100 clients and 2 shards of 300 images).

    Shards differ in size by one sample at most; one that lies where two classes meet has samples of both.
    """

    least = "shards"
    shards: Count = 2

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        count, by_class = num_clients * self.shards, in_order(labels, rng)
        shard_n = np.arange(len(labels)) * count // len(labels)
        return placed((rng.permutation(count) // self.shards)[shard_n], by_class)


@checked
@dataclass(frozen=True)
class DirichletSizes(Partitioner):
    """Unequal sizes, equal mixes: the clients' shares of the samples are one Dirichlet(α) draw over all clients, which
    samples is random ("quantity skew" in Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022).

    Clients below ``min_size`` are filled up from the largest. Every sample is assigned.
    """

    by_class = False
    least = "min_size"
    alpha: Alpha
    min_size: Count = 1

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        sizes_N = cut(softmax(log_gamma(self.alpha, (num_clients,), rng)), len(labels))
        owner_n = placed(np.repeat(np.arange(num_clients), sizes_N), rng.permutation(len(labels)))
        fill_up(owner_n, num_clients, self.min_size, rng)
        return owner_n
