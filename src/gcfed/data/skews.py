"""Two more partitions of the literature: shards of sorted samples, and unequal sizes."""

from dataclasses import dataclass

import numpy as np

from gcfed.data.dealing import cut, fill_up, in_order, log_gamma, placed, softmax
from gcfed.data.partition import Alpha, Partitioner
from gcfed.utils.checked import Count, checked


@checked
@dataclass(frozen=True)
class Shards(Partitioner):
    """Samples are sorted by class and cut into shards; each client gets ``shards`` random ones. FedAvg's pathological
    split (McMahan et al., AISTATS 2017) has 100 clients and 2 shards of 300 images.

    Sizes of shards differ by at most one sample. A shard can have samples of two classes.
    """

    least = "shards"
    bins = None  # sorts a regression's targets by their values
    shards: Count = 2

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        count, by_class = num_clients * self.shards, in_order(labels, rng)
        shard_n = np.arange(len(labels)) * count // len(labels)
        return placed((rng.permutation(count) // self.shards)[shard_n], by_class)


@checked
@dataclass(frozen=True)
class DirichletSizes(Partitioner):
    """Unequal sizes, equal mixes: a Dirichlet(α) draw gives each client's share of the samples, which are random
    ("quantity skew" in Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022).

    Clients below ``min_size`` are filled up from the largest clients. Every sample is assigned.
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
