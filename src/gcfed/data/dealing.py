"""The arithmetic under the partitioners: Dirichlet draws that cannot underflow, counts turned into owners, shares."""

import logging

import numpy as np

from gcfed.utils.rng import generator

log = logging.getLogger(__name__)


def log_gamma(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Logarithms of Gamma(α) draws, whose softmax is a Dirichlet(α) draw.

    As Gamma(α) = Gamma(α + 1) · U^(1/α), they exist where the draws themselves would underflow to a vector of zeros,
    and softmax over a part of them is the renormalised draw even where that part has no mass left in floating point.
    """
    draws = np.log(rng.standard_gamma(alpha + 1, shape))
    draws -= rng.standard_exponential(shape) / alpha
    return draws


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def cut(shares_N: np.ndarray, size: int) -> np.ndarray:
    """How many of ``size`` samples each client gets by its share, laid end to end, int64 [N]."""
    ends = np.cumsum(shares_N)
    return np.diff(np.floor(ends / ends[-1] * size).astype(np.int64), prepend=0)


def in_order(values_n: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The places of the values from the lowest to the highest, equal ones at random, int64 [n]."""
    shuffled = rng.permutation(len(values_n))
    return shuffled[np.argsort(values_n[shuffled], kind="stable")]


def placed(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The values, one after the other, in the places that ``order`` names, each once, [n]."""
    out = np.empty_like(values)
    out[order] = values
    return out


def deal(counts_CN: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Give client k ``counts_CN[c, k]`` random samples of the c-th class present in ``labels`` [n].

    Returns the owner of each sample, int64 [n], −1 for none.
    """
    class_sizes = np.unique(labels, return_counts=True)[1]
    counts_CN = np.column_stack([counts_CN, class_sizes - counts_CN.sum(1)])
    clients = np.append(np.arange(counts_CN.shape[1] - 1), -1)
    return placed(np.repeat(np.tile(clients, len(class_sizes)), counts_CN.ravel()), in_order(labels, rng))


def fill_up(owner_n: np.ndarray, num_clients: int, min_size: int, rng: np.random.Generator) -> None:
    """Give clients below ``min_size`` what they lack, in place, from the largest ones, cut to one common level."""
    sizes_N = np.bincount(owner_n, minlength=num_clients)
    lacking_N = np.maximum(min_size - sizes_N, 0)
    low, high = min_size, int(sizes_N.max())  # the highest level whose surplus still covers what is lacking
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(sizes_N - level, 0).sum() >= lacking_N.sum() else (low, level - 1)
    surplus_N = np.maximum(sizes_N - low, 0)
    excess = surplus_N.sum() - lacking_N.sum()
    surplus_N[np.flatnonzero(surplus_N)[:excess]] -= 1  # fewer than there are donors, or the level could be higher

    by_owner = in_order(owner_n, rng)
    place = np.arange(len(owner_n)) - np.repeat(np.cumsum(sizes_N) - sizes_N, sizes_N)
    given = by_owner[place < surplus_N[owner_n[by_owner]]]
    owner_n[rng.permutation(given)] = np.repeat(np.arange(num_clients), lacking_N)


def held_out(
    labels: np.ndarray, share: float, purpose: str, groups: np.ndarray | None = None, name: str = ""
) -> np.ndarray:
    """Which samples are set aside, bool [n]: a share, at least one and not all, of each class where labels are [n].

    Each class gives its part, give or take one sample. The draw is the same for all seeds. Where all samples of natural
    ``groups``, [n], are set aside, so that they cannot be clients, a warning about the data set ``name`` says so.
    """
    n = len(labels)
    count = min(max(round(share * n), 1), n - 1)
    order = in_order(labels if labels.ndim == 1 else np.zeros(n), generator(0, purpose))
    aside = placed(np.diff(np.arange(n + 1) * count // n) == 1, order)  # every so many in the order of classes
    if groups is not None and (absent := len(np.setdiff1d(groups, groups[~aside]))):
        words = "%s: %d of %d groups have all their samples in the %s split, and cannot be clients"
        log.warning(words, name, absent, len(np.unique(groups)), purpose)
    return aside
