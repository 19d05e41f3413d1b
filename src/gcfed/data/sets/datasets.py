"""The loaders that ``configs/data/*.yaml`` name: ``loader(…) -> FederatedDataset``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.dealing import held_out
from gcfed.data.sets.hwdigits import hwdigits  # noqa: F401
from gcfed.data.sets.leaf import celeba, femnist, shakespeare, tiny_shakespeare  # noqa: F401
from gcfed.data.sets.vision import tiny_imagenet, torchvision_set  # noqa: F401
from gcfed.utils.checked import Count, SettingError, Weight, Whole, checked
from gcfed.utils.rng import generator


@checked
def digits() -> FederatedDataset:
    """The UCI handwritten digits that come with scikit-learn, [n, 1, 8, 8]: 1,437 to train on and 360 to test.

    The split is stratified and the same in every run. The set is part of this package.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        x, y = np.round(file["x"] * (255 / 16)).astype(np.uint8), file["y"].astype(np.int64)
    chosen, whole = held_out(y, 360 / len(y), "digits"), Split(x[:, None], y)
    return FederatedDataset("digits", 10, whole.subset(~chosen), whole.subset(chosen), tuple("0123456789"))


@checked
def synthetic(
    *, num_classes: Count = 10, shape: Sequence[Count] = (1, 8, 8), num_train: Count = 10_000, num_test: Count = 2_000,
    noise: Weight = 64.0, seed: Whole = 0, num_groups: Count | None = None, shift: Weight = 32.0,
) -> FederatedDataset:  # fmt: skip
    """A task to learn, of any size: each class is a 4×4 pattern of brightness, seen through Gaussian noise.

    ``shape`` is (C, H, W); ``noise`` and ``shift`` are standard deviations in grey levels (0 … 255). ``num_groups``
    domains each add a 4×4 pattern of their own to all their images, and become the groups of both splits. Classes and
    groups are balanced.
    """
    if len(shape) != 3:
        raise SettingError("shape", f"={[*shape]} must be [channels, height, width].")
    rng = generator(seed, "synthetic")
    prototypes = _patterns(rng.uniform(48, 208, (num_classes, shape[0], 4, 4)), shape)
    domains = _patterns(rng.normal(0, shift, (num_groups or 1, shape[0], 4, 4)), shape)

    def split(part: int, n: int) -> Split:
        rng = generator(seed, "synthetic", part)
        y = rng.permutation(np.arange(n) % num_classes)
        groups = None if num_groups is None else np.arange(n) % num_groups
        x = np.empty((n, *shape), np.uint8)
        rows = max(1, 2**22 // prototypes[0].size)  # 16 MB of floats at a time
        for part_of in (slice(start, start + rows) for start in range(0, n, rows)):
            images = rng.standard_normal(x[part_of].shape, dtype=np.float32)
            images *= np.float32(noise)
            images += prototypes[y[part_of]]
            if groups is not None:
                images += domains[groups[part_of]]
            x[part_of] = np.clip(images, 0, 255, out=images)
        return Split(x, y, groups)

    return FederatedDataset("synthetic", num_classes, split(0, num_train), split(1, num_test))


def _patterns(grid: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """[m, C, 4, 4] enlarged to float32 [m, C, H, W]: coarse, so that a random crop leaves the class visible."""
    rows, columns = (np.arange(length) * 4 // length for length in shape[1:])
    return grid.astype(np.float32)[:, :, rows[:, None], columns]
