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
    """UCI's handwritten digits, as scikit-learn has them, [n, 1, 8, 8]: 1,437 training and 360 test images.

    The split is stratified and the same in every run. The images are part of this package.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        x, y = np.round(file["x"] * (255 / 16)).astype(np.uint8), file["y"].astype(np.int64)
    chosen, whole = held_out(y, 360 / len(y), "digits"), Split(x[:, None], y)
    return FederatedDataset("digits", 10, whole.subset(~chosen), whole.subset(chosen), tuple("0123456789"))


@checked
def synthetic(
    *, num_classes: Count = 10, shape: Sequence[Count] = (1, 8, 8), num_train: Count = 10_000, num_test: Count = 2_000,
    noise: Weight = 64.0, seed: Whole = 0,
) -> FederatedDataset:  # fmt: skip
    """Images of any size that can be learned: each class is a 4×4 pattern of brightness, plus Gaussian noise.

    ``shape`` is (C, H, W). ``noise`` is a standard deviation in grey levels (0 … 255). Classes are balanced.
    """
    if len(shape) != 3:
        raise SettingError("shape", f"={[*shape]} must be [channels, height, width].")
    grid = generator(seed, "synthetic").uniform(48, 208, (num_classes, shape[0], 4, 4)).astype(np.float32)
    rows, columns = (np.arange(length) * 4 // length for length in shape[1:])
    prototypes = grid[:, :, rows[:, None], columns]  # coarse, so that a random crop leaves the class visible

    def split(part: int, n: int) -> Split:
        rng = generator(seed, "synthetic", part)
        y = rng.permutation(np.arange(n) % num_classes)
        x = np.empty((n, *shape), np.uint8)
        block = max(1, 2**22 // prototypes[0].size)  # 16 MB of floats at a time
        for start in range(0, n, block):
            labels = y[start : start + block]
            images = rng.standard_normal((len(labels), *shape), dtype=np.float32) * np.float32(noise)
            x[start : start + block] = np.clip(images + prototypes[labels], 0, 255)
        return Split(x, y)

    return FederatedDataset("synthetic", num_classes, split(0, num_train), split(1, num_test))
