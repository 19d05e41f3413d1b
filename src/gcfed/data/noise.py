"""Clients with noisy samples or wrong labels."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from gcfed.data.partition import Partition
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator


def noisy_samples(x: ndarray, partition: Partition, sigma: float, seed: int) -> ndarray:
    """A copy of the samples [n, …] in which client k = 1 … N has Gaussian noise of standard
    deviation σ·k/N.

    "Noise-based feature imbalance" in Li et al., "Federated Learning on Non-IID Data Silos", ICDE
    2022, which draws new noise in every epoch. Here each sample has one draw. σ is in units of the
    range 0 … 1 of images, whose pixels are rounded and clipped, and in units of the network's
    inputs for vectors.

    Raises Refusal for texts.
    """
    if x.dtype.kind in "iu" and x.ndim == 2:
        raise Refusal(
            f"data.feature_noise={sigma} is for images and vectors, not for texts: set it to null."
        )
    noisy = np.array(x)
    are_images = x.dtype == np.uint8
    unit = 255 if are_images else 1
    for client in range(partition.num_clients):
        samples = partition.client(client)
        rng = generator(seed, "feature_noise", client)
        noise = rng.standard_normal((len(samples), *x.shape[1:]), np.float32)
        noise *= unit * sigma * (client + 1) / partition.num_clients
        values = x[samples] + noise
        if are_images:
            values = np.rint(values).clip(0, 255)
        noisy[samples] = values
    return noisy


def noisy_labels(
    y: ndarray, num_classes: int, partition: Partition, levels: Sequence[float], seed: int
) -> ndarray:
    """A copy of the labels, int64 [n]. ``levels`` are (ρ, τ): a client is noisy with probability ρ.
    A noisy client draws a share from U(τ, 1), and random other classes replace this share of its
    labels, rounded.

    Xu et al., "FedCorr", CVPR 2022, whose random classes include the true one.

    Raises Refusal for other labels than one class per sample.
    """
    if y.ndim > 1 or num_classes < 2:
        raise Refusal(
            f"data.label_noise={[*levels]} replaces one of several classes of a sample, which these"
            " data do not have: set it to null."
        )
    noisy = np.array(y)
    probability, least = levels
    for client in range(partition.num_clients):
        rng = generator(seed, "label_noise", client)
        if rng.random() >= probability:
            continue
        share = rng.uniform(least, 1)
        samples = partition.client(client)
        wrong = rng.permutation(samples)[: round(share * len(samples))]
        steps = rng.integers(1, num_classes, len(wrong))
        noisy[wrong] = (y[wrong] + steps) % num_classes
    return noisy
