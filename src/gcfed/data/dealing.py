"""The arithmetic of the partitioners: Dirichlet draws without underflow, and which client gets
which sample.
"""

from bisect import bisect_left

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from gcfed.utils.rng import generator


def log_gamma(alpha: float, shape: tuple[int, ...], rng: Generator) -> ndarray:
    """Logarithms of Gamma(α) draws. Their softmax is a Dirichlet(α) draw.

    Gamma(α) = Gamma(α + 1) · U^(1/α), so the logarithms are finite even if the draws would
    underflow to zeros. The softmax of a subset is the renormalised draw, even if the subset has no
    mass left in floating point.
    """
    return np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha


def softmax(logits: ndarray) -> ndarray:
    """Over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def cut(shares_N: ndarray, size: int) -> ndarray:
    """How many of ``size`` samples each client gets for its share, int64 [N]."""
    ends = np.cumsum(shares_N)
    return np.diff(np.floor(ends / ends[-1] * size).astype(np.int64), prepend=0)


def in_order(values_n: ndarray, rng: Generator) -> ndarray:
    """The positions of the values in ascending order, equal values in random order, int64 [n]."""
    shuffled = rng.permutation(len(values_n))
    return shuffled[np.argsort(values_n[shuffled], kind="stable")]


def scatter(values: ndarray, order: ndarray) -> ndarray:
    """The inverse of indexing: ``out[order[i]] = values[i]``, [n]."""
    out = np.empty_like(values)
    out[order] = values
    return out


def deal(counts_CN: ndarray, labels: ndarray, rng: Generator) -> ndarray:
    """Gives client k ``counts_CN[c, k]`` random samples of the c-th class in ``labels``, [n].

    Returns the owner of each sample, int64 [n], −1 for none.
    """
    class_sizes = np.unique(labels, return_counts=True)[1]
    counts = np.column_stack([counts_CN, class_sizes - counts_CN.sum(1)])
    clients = np.append(np.arange(counts_CN.shape[1]), -1)
    owners = np.repeat(np.tile(clients, len(class_sizes)), counts.ravel())
    return scatter(owners, in_order(labels, rng))


def fill_up(owner_n: ndarray, num_clients: int, min_size: int, rng: Generator) -> None:
    """Fills clients up to ``min_size`` samples, in place.

    The largest clients give them, down to one common level.
    """
    sizes_N = np.bincount(owner_n, minlength=num_clients)
    lacking_N = np.maximum(min_size - sizes_N, 0)

    def above(level: int) -> ndarray:
        """The samples of each client above this level, int64 [N]."""
        return np.maximum(sizes_N - level, 0)

    levels = range(sizes_N.max(), min_size - 1, -1)
    first = bisect_left(levels, lacking_N.sum(), key=lambda level: above(level).sum())
    surplus_N = above(levels[first])
    excess = surplus_N.sum() - lacking_N.sum()
    # less than one each, or the level could be higher
    surplus_N[np.flatnonzero(surplus_N)[:excess]] -= 1

    by_owner = in_order(owner_n, rng)
    starts_N = np.cumsum(sizes_N) - sizes_N
    place = np.arange(len(owner_n)) - np.repeat(starts_N, sizes_N)
    given_away = by_owner[place < surplus_N[owner_n[by_owner]]]
    owner_n[rng.permutation(given_away)] = np.repeat(np.arange(num_clients), lacking_N)


def held_out(labels: ndarray, share: float, purpose: str, *, by_class: bool = True) -> ndarray:
    """Which samples are held out, bool [n].

    At least one sample is held out, and at least one stays. The draw is the same for all seeds.

    Args:
        share: of each class if labels are [n], up to one sample; of all samples if they have more
            axes.
        by_class: False: the share is always that of all samples.
    """
    size = len(labels)
    count = min(max(round(share * size), 1), size - 1)
    classes = labels if by_class and labels.ndim == 1 else np.zeros(size)
    order = in_order(classes, generator(0, purpose))
    steps = np.arange(size + 1) * count // size  # evenly spaced in the order of classes
    return scatter(np.diff(steps) == 1, order)
