"""Feature shifts on top of any partition: clients whose images differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from gcfed.data.partition import Partition
from gcfed.utils.checked import checked

Order = Literal["rgb", "rbg", "grb", "gbr", "brg", "bgr"]
Change = Callable[[np.ndarray], np.ndarray]
"""A function of images, uint8 [m, C, H, W], to images of the same shape."""


@checked
@dataclass(frozen=True)
class Shift:
    """Divides the clients into G random groups and changes all images of a group in the same way.

    Groups have equal sizes, up to one client, and do not depend on the classes. Each test image belongs to a random
    group.

    of: the partition of the samples. A subclass adds a list with one entry per group.
    """

    of: Callable[..., Partition]

    def __call__(self, *labels_and_clients: Any, **seed_and_groups: Any) -> Partition:
        return self.of(*labels_and_clients, **seed_and_groups)

    def shifted(self, x_nCHW: np.ndarray, owner_n: np.ndarray, owners: int, rng: np.random.Generator) -> np.ndarray:
        """A changed copy of the images, uint8 [n, C, H, W], with owners [n]; ``rng`` draws the owners' groups.

        Raises ValueError for samples that cannot be changed like this.
        """
        x_nCHW, changes = np.array(x_nCHW), self.changes(x_nCHW.shape[1:])
        group_n = (rng.permutation(owners) % len(changes))[owner_n]  # −1, without an owner, gets any group
        for group, change in enumerate(changes):
            x_nCHW[group_n == group] = change(x_nCHW[group_n == group])
        return x_nCHW

    def changes(self, input_shape: tuple[int, ...]) -> list[Change]:
        """The change of each group's images."""
        raise NotImplementedError


@checked
@dataclass(frozen=True)
class Rotation(Shift):
    """Images rotated counter-clockwise by quarters: IFCA's rotated MNIST and CIFAR (Ghosh et al., NeurIPS 2020)."""

    degrees: Annotated[Sequence[Literal[0, 90, 180, 270]], Field(min_length=1)] = (0, 90, 180, 270)

    def changes(self, input_shape: tuple[int, ...]) -> list[Change]:
        if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
            raise ValueError(f"partition=rotation rotates square images, not samples of the shape {[*input_shape]}.")
        return [partial(np.rot90, k=degree // 90, axes=(2, 3)) for degree in self.degrees]


@checked
@dataclass(frozen=True)
class Colour(Shift):
    """Images with their colour channels in another order: those in the place of red, green and blue, for each group."""

    orders: Annotated[Sequence[Order], Field(min_length=1)] = ("rgb", "gbr", "brg")

    def changes(self, input_shape: tuple[int, ...]) -> list[Change]:
        if len(input_shape) != 3 or input_shape[0] != 3:
            raise ValueError(f"partition=colour is for colour images, not for samples of the shape {[*input_shape]}.")
        return [partial(np.take, indices=["rgb".index(channel) for channel in order], axis=1) for order in self.orders]
