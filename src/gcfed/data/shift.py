"""Clients whose labels are alike and whose images are not: shifts of the features, on top of any partition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcfed.data.partition import Partition, Partitioner
from gcfed.utils.number import choice, numbers, part


@dataclass(frozen=True)
class Shift:
    """The clients fall into G groups, drawn at random, and all images of a group are changed alike.

    Groups have equal sizes, up to one client, and know nothing of who holds which class: by k mod G in place of chance
    each group would lack classes under a partition that deals them in turn, as ``classes`` does. The test split is
    changed likewise, its images falling into the groups at random.

    of: the partition, which says who holds which sample.
    """

    of: Partitioner

    def __post_init__(self) -> None:
        part("partition.of", self.of)

    def __call__(
        self, labels: np.ndarray, num_clients: int, *, seed: int, groups: np.ndarray | None = None
    ) -> Partition:
        return self.of(labels, num_clients, seed=seed, groups=groups)

    def shifted(self, x_nCHW: np.ndarray, owner_n: np.ndarray, owners: int, rng: np.random.Generator) -> np.ndarray:
        """A copy of the images, uint8 [n, C, H, W], as their owners, [n], see them; ``rng`` draws the owners' groups.

        Raises ValueError for samples that cannot be changed so.
        """
        x_nCHW, options = np.array(x_nCHW), self.options(x_nCHW.shape[1:])
        group_n = (rng.permutation(owners) % len(options))[owner_n]  # of nobody's any
        for group, option in enumerate(options):
            of_group = group_n == group
            x_nCHW[of_group] = self.change(x_nCHW[of_group], option)
        return x_nCHW

    def options(self, input_shape: tuple[int, ...]) -> Sequence:
        """What each group's images are changed by."""
        raise NotImplementedError

    def change(self, x_nCHW: np.ndarray, option: Any) -> np.ndarray:
        """The images of one group."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rotation(Shift):
    """Images turned counter-clockwise by quarters: IFCA's rotated MNIST and CIFAR (Ghosh et al., NeurIPS 2020).

    degrees: of each group, multiples of 90.
    """

    degrees: Sequence[int] = (0, 90, 180, 270)

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers("partition.degrees", self.degrees, 0, 270, whole=True)
        if not self.degrees or any(d % 90 for d in self.degrees):
            raise ValueError(
                f"partition.degrees={[*self.degrees]} must be multiples of 90, one for each group of clients."
            )

    def options(self, input_shape: tuple[int, ...]) -> Sequence[int]:
        if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
            raise ValueError(f"partition=rotation turns square images, not samples of the shape {[*input_shape]}.")
        return self.degrees

    def change(self, x_nCHW: np.ndarray, option: int) -> np.ndarray:
        return np.rot90(x_nCHW, option // 90, axes=(2, 3))


@dataclass(frozen=True)
class Colour(Shift):
    """Images with their three channels in another order, so that what is red to one group is green to another.

    orders: of each group, the channels that it sees as red, green and blue.
    """

    orders: Sequence[str] = ("rgb", "gbr", "brg")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.orders, str) or not isinstance(self.orders, Sequence) or not self.orders:
            raise ValueError(f"partition.orders={self.orders} must be a list of orders, one for each group.")
        for i, order in enumerate(self.orders):
            choice(f"partition.orders[{i}]", order, ["rgb", "rbg", "grb", "gbr", "brg", "bgr"])

    def options(self, input_shape: tuple[int, ...]) -> Sequence[str]:
        if len(input_shape) != 3 or input_shape[0] != 3:
            raise ValueError(f"partition=colour is for colour images, not for samples of the shape {[*input_shape]}.")
        return self.orders

    def change(self, x_nCHW: np.ndarray, option: str) -> np.ndarray:
        return x_nCHW[:, ["rgb".index(channel) for channel in option]]
