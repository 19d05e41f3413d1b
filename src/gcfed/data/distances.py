"""How far the labels and the inputs of clients differ, as numbers."""

import numpy as np
from numpy import ndarray

from gcfed.data.partition import Partition

#: Keys of a summary: distances between the clients' labels, and between their inputs.
LABEL_SKEW = ("partition/hellinger", "partition/jensen_shannon")
FEATURE_SKEW = "partition/feature_distance"
MOST_CLIENTS = 200
MOST_SAMPLES = 100  # of a client
MOST_COORDINATES = 1000  # of a sample


def label_skew(held_NC: ndarray) -> dict[str, float]:
    """How far the clients' labels are from the labels of all clients together, from 0 (i.i.d.) to
    1.

    With p the shares of the classes at a client, and q those of all samples, there are two
    distances: Hellinger √(1 − Σ √(p q)), and Jensen–Shannon √(H((p + q)/2) − (H(p) + H(q))/2) with
    entropies H in bits. The figures are their means over the clients with samples.

    Args:
        held_NC: the samples of each class at each client.
    """
    counts_NC = held_NC[held_NC.sum(1) > 0]
    p_NC = counts_NC / counts_NC.sum(1, keepdims=True)
    q_C = counts_NC.sum(0) / counts_NC.sum()
    hellinger_N = 1 - np.sqrt(p_NC * q_C).sum(1)
    shannon_N = _entropy((p_NC + q_C) / 2) - (_entropy(p_NC) + _entropy(q_C)) / 2
    skew = {}
    for name, square_N in zip(LABEL_SKEW, (hellinger_N, shannon_N), strict=True):
        skew[name] = float(np.sqrt(square_N.clip(0)).mean())
    return skew


def _entropy(shares: ndarray) -> ndarray:
    """The entropy over the last axis, in bits."""
    return -(shares * np.log2(np.maximum(shares, 1e-300))).sum(-1)


def feature_distance(x: ndarray, partition: Partition) -> float | None:
    """The mean over clients of the distance between a client's mean input and that of all samples,
    in pooled standard deviations.

    dₖ = √(mean over the coordinates j of ((μₖⱼ − μⱼ)/σⱼ)²), where μ and σ are the mean and the
    standard deviation of all clients' samples, and a coordinate that does not vary is left out. It
    is 0 for equal means, and about 1/√n for clients with n random samples each.

    It reads at most 200 clients, 100 samples of each, and 1,000 coordinates of a sample, evenly
    spaced. A client counts by all its samples in μ and σ.

    Args:
        x: the training inputs [n, …], images or vectors of numbers.

    Returns None if nothing varies or no client has samples.
    """
    with_samples = np.flatnonzero(partition.sizes)
    clients = spaced(with_samples, MOST_CLIENTS)
    if not len(clients):
        return None
    coordinates = spaced(np.arange(np.prod(x.shape[1:], dtype=int)), MOST_COORDINATES)
    means = []
    variances = []
    for client in clients.tolist():
        drawn = spaced(partition.client(client), MOST_SAMPLES)
        inputs_nd = x[drawn].reshape(len(drawn), -1)[:, coordinates].astype(np.float64)
        means.append(inputs_nd.mean(0))
        variances.append(inputs_nd.var(0))
    mean_Kd = np.stack(means)
    weights_K = partition.sizes[clients] / partition.sizes[clients].sum()
    mean_d = weights_K @ mean_Kd
    offset_Kd = mean_Kd - mean_d
    deviation_d = np.sqrt(weights_K @ (np.stack(variances) + offset_Kd**2))
    varies = deviation_d > 1e-9 * np.abs(mean_d)  # a constant varies by its rounding
    if not varies.any():
        return None
    squares_Kd = (offset_Kd[:, varies] / deviation_d[varies]) ** 2
    return float(np.sqrt(squares_Kd.mean(1)).mean())


def spaced(values: ndarray, most: int) -> ndarray:
    """All values, or ``most`` of them at even distances."""
    if len(values) <= most:
        return values
    return values[np.arange(most) * len(values) // most]
