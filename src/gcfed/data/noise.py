"""Noise that differs between clients: Gaussian noise on their samples, and wrong labels."""

from collections.abc import Sequence

import numpy as np

from gcfed.data.partition import Partition
from gcfed.utils.rng import generator


def noisy_samples(x: np.ndarray, partition: Partition, sigma: float, seed: int) -> np.ndarray:
    """A copy of the samples [n, …] in which client k = 1 … N has Gaussian noise of standard deviation σ·k/N.

    "Noise-based feature imbalance" in Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022, which draws new
    noise in every epoch. Here each sample has one draw. σ is in units of the range 0 … 1 of images, whose pixels are
    rounded and clipped, and in units of the network's inputs for vectors.

    Raises ValueError for texts.
    """
    if x.dtype == np.uint8 and x.ndim == 2:
        raise ValueError(f"data.feature_noise={sigma} is for images and vectors, not for texts: set it to null.")
    x = np.array(x)
    for k in range(partition.num_clients):
        held = partition.client(k)
        noise = generator(seed, "feature_noise", k).standard_normal((len(held), *x.shape[1:]), np.float32)
        noise *= (255 if x.dtype == np.uint8 else 1) * sigma * (k + 1) / partition.num_clients
        if x.dtype != np.uint8:
            x[held] += noise
            continue
        noise += x[held]
        x[held] = np.rint(noise, out=noise).clip(0, 255, out=noise)
    return x


def noisy_labels(
    y: np.ndarray, num_classes: int, partition: Partition, levels: Sequence[float], seed: int
) -> np.ndarray:
    """A copy of the labels, int64 [n]. ``levels`` are (ρ, τ): a client is noisy with probability ρ. A noisy client
    draws a share from U(τ, 1), and random other classes replace this share of its labels, rounded.

    Xu et al., "FedCorr", CVPR 2022, whose random classes include the true one.

    Raises ValueError for other labels than one class per sample.
    """
    if y.ndim > 1 or num_classes < 2:
        what = "replaces one of several classes of a sample, which these data do not have: set it to null"
        raise ValueError(f"data.label_noise={[*levels]} {what}.")
    y, (probability, least) = np.array(y), levels
    for k in range(partition.num_clients):
        rng, held = generator(seed, "label_noise", k), partition.client(k)
        share = rng.uniform(least, 1) if rng.random() < probability else 0.0
        wrong = rng.permutation(held)[: round(share * len(held))]
        y[wrong] = (y[wrong] + rng.integers(1, num_classes, len(wrong))) % num_classes
    return y
