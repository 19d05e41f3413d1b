"""More differences between clients: shards of sorted samples, unequal sizes, and changed images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from pydantic import Field

from gcfed.data.dealing import cut, fill_up, in_order, log_gamma, scatter, softmax
from gcfed.data.partition import Partition, Partitioner
from gcfed.utils.checked import Count, Positive, checked
from gcfed.utils.refusal import Refusal

# of images, uint8 [m, C, H, W], to images of the same shape
Change = Callable[[ndarray], ndarray]


@checked
@dataclass(frozen=True)
class Shards(Partitioner):
    """Samples are sorted by class and cut into shards; each client gets ``shards`` random ones.
    FedAvg's pathological split (McMahan et al., AISTATS 2017) has 100 clients and 2 shards of 300
    images.

    Sizes of shards differ by at most one sample. A shard can have samples of two classes.
    """

    least = "shards"
    bins = None  # sorts a regression's targets by their values
    shards: Count = 2

    def owners(self, labels: ndarray, num_clients: int, rng: Generator) -> ndarray:
        count = num_clients * self.shards
        by_class = in_order(labels, rng)
        shard_n = np.arange(len(labels)) * count // len(labels)
        owners = rng.permutation(count) // self.shards
        return scatter(owners[shard_n], by_class)


@checked
@dataclass(frozen=True)
class DirichletSizes(Partitioner):
    """Unequal sizes, equal mixes: a Dirichlet(α) draw gives each client's share of the samples,
    which are random ("quantity skew" in Li et al., "Federated Learning on Non-IID Data Silos", ICDE
    2022).

    Clients below ``min_size`` are filled up from the largest clients. Every sample is assigned.
    """

    by_class = False
    least = "min_size"
    alpha: Positive
    min_size: Count = 1

    def owners(self, labels: ndarray, num_clients: int, rng: Generator) -> ndarray:
        shares_N = softmax(log_gamma(self.alpha, (num_clients,), rng))
        sizes_N = cut(shares_N, len(labels))
        owners = np.repeat(np.arange(num_clients), sizes_N)
        owner_n = scatter(owners, rng.permutation(len(labels)))
        fill_up(owner_n, num_clients, self.min_size, rng)
        return owner_n


@checked
@dataclass(frozen=True)
class Shift:
    """Divides the clients into G random groups and changes all images of a group in the same way.

    Groups have equal sizes, up to one client, and do not depend on the classes. A test image has a
    random group.

    of: the partition of the samples. A subclass adds a list with one entry per group.
    """

    of: Callable[..., Partition]

    def __call__(self, *labels_and_clients: Any, **seed_and_groups: Any) -> Partition:
        return self.of(*labels_and_clients, **seed_and_groups)

    def shifted(self, x_nCHW: ndarray, owner_n: ndarray, owners: int, rng: Generator) -> ndarray:
        """A changed copy of the images, uint8 [n, C, H, W], with owners [n]; ``rng`` draws the
        owners' groups.

        Raises Refusal for samples that cannot be changed like this.
        """
        changed = np.array(x_nCHW)
        changes = self.changes(x_nCHW.shape[1:])
        groups = rng.permutation(owners) % len(changes)
        group_n = groups[owner_n]  # −1, without an owner, gets any group
        for group, change in enumerate(changes):
            members = group_n == group
            changed[members] = change(x_nCHW[members])
        return changed

    def changes(self, input_shape: tuple[int, ...]) -> list[Change]:
        """The change of each group's images."""
        raise NotImplementedError


@checked
@dataclass(frozen=True)
class Rotation(Shift):
    """Images rotated counter-clockwise by quarters: IFCA's rotated MNIST and CIFAR (Ghosh et al.,
    NeurIPS 2020).
    """

    degrees: Annotated[Sequence[Literal[0, 90, 180, 270]], Field(min_length=1)] = (0, 90, 180, 270)

    def changes(self, input_shape: tuple[int, ...]) -> list[Change]:
        if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
            raise Refusal(
                "partition=rotation rotates square images, not samples of the shape"
                f" {[*input_shape]}."
            )
        return [partial(np.rot90, k=degree // 90, axes=(2, 3)) for degree in self.degrees]
