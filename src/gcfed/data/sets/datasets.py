"""The loaders that ``configs/data/*.yaml`` name: ``loader(…) -> FederatedDataset``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.dealing import held_out
from gcfed.data.sets.hwdigits import hwdigits  # noqa: F401
from gcfed.data.sets.leaf import celeba, femnist, shakespeare  # noqa: F401
from gcfed.data.sets.tiny_shakespeare import tiny_shakespeare  # noqa: F401
from gcfed.data.sets.vision import tiny_imagenet, torchvision_set  # noqa: F401
from gcfed.utils.checked import Count, SettingError, Weight, Whole, checked
from gcfed.utils.rng import generator


@checked
def digits() -> FederatedDataset:
    """UCI's handwritten digits, as scikit-learn has them, [n, 1, 8, 8]: 1,437 training and 360 test
    images.

    The split is stratified and the same in every run. The images are part of this package.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        x = np.round(file["x"] * (255 / 16)).astype(np.uint8)
        y = file["y"].astype(np.int64)
    whole = Split(x[:, None], y)
    chosen = held_out(y, 360 / len(y), "digits")
    train = whole.subset(~chosen)
    test = whole.subset(chosen)
    return FederatedDataset("digits", 10, train, test, tuple("0123456789"))


@checked
def synthetic(
    *,
    num_classes: Count = 10,
    shape: Sequence[Count] = (1, 8, 8),
    num_train: Count = 10_000,
    num_test: Count = 2_000,
    noise: Weight = 64.0,
    seed: Whole = 0,
) -> FederatedDataset:
    """Images of any size that can be learned: each class is a 4×4 pattern of brightness, plus
    Gaussian noise.

    ``shape`` is (C, H, W). ``noise`` is a standard deviation in grey levels (0 … 255). Classes are
    balanced.
    """
    if len(shape) != 3:
        raise SettingError("shape", f"={[*shape]} must be [channels, height, width].")
    channels, height, width = shape
    grid = generator(seed, "synthetic").uniform(48, 208, (num_classes, channels, 4, 4))
    grid = grid.astype(np.float32)
    rows = np.arange(height) * 4 // height
    columns = np.arange(width) * 4 // width
    # coarse, so that a random crop leaves the class visible
    prototypes = grid[:, :, rows[:, None], columns]

    def split(part: int, n: int) -> Split:
        rng = generator(seed, "synthetic", part)
        y = rng.permutation(np.arange(n) % num_classes)
        x = np.empty((n, *shape), np.uint8)
        for i in range(0, n, 1000):  # in blocks, because floats need much memory
            means = prototypes[y[i : i + 1000]]
            images = means + np.float32(noise) * rng.standard_normal(means.shape, dtype=np.float32)
            x[i : i + 1000] = np.clip(images, 0, 255)
        return Split(x, y)

    return FederatedDataset("synthetic", num_classes, split(0, num_train), split(1, num_test))


@checked
def matrix_regression(
    *,
    num_clients: Count = 20,
    features: Count = 100,
    outputs: Count = 10,
    samples: Count = 200,
    test_samples: Count = 50,
    shift: Weight = 2.0,
    noise: Weight = 0.1,
    ridge: Weight = 0.1,
    seed: Whole = 0,
) -> FederatedDataset:
    """Matrix regression with a known optimum: SSF's benchmark (arXiv 2604.25467, Section 5.1).

    Client k draws x = m_k + N(0, I) with m_k = ν N(0, I), and y = xW + σ N(0, I); all clients share
    W ~ N(0, 1). The mean of the clients' objectives ``1/(2n) ‖X_k W − Y_k‖² + μ/2 ‖W‖²`` (equations
    130 and 131) has its minimum at ``W* = (mean X_kᵀX_k / n + μI)⁻¹ mean X_kᵀY_k / n``.
    ``optimum["fc.weight"]`` is W*, transposed as in torch.

    Args:
        samples, test_samples: of each client. Client k is group k.
        shift: ν.
        noise: σ.
        ridge: μ. Clients minimise it as their ``client.optimizer.weight_decay``.
    """
    rng = generator(seed, "matrix_regression")
    weight = rng.standard_normal((features, outputs))
    means = shift * rng.standard_normal((num_clients, 1, features))

    def split(n: int) -> Split:
        x = means + rng.standard_normal((num_clients, n, features))
        x = x.reshape(-1, features)
        y = x @ weight + noise * rng.standard_normal((len(x), outputs))
        groups = np.repeat(np.arange(num_clients), n)
        return Split(x.astype(np.float32), y.astype(np.float32), groups)

    train = split(samples)
    test = split(test_samples)
    x = train.x.astype(np.float64)  # as the clients have them
    y = train.y.astype(np.float64)
    curvature = x.T @ x / len(x) + ridge * np.eye(features)
    best = np.linalg.solve(curvature, x.T @ y / len(x))
    optimum = {"fc.weight": best.T}
    return FederatedDataset("matrix_regression", outputs, train, test, optimum=optimum)
