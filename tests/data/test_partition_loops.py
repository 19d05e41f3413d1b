"""The partitions equal plain loops over classes and clients that repeat the draws."""

import zlib

import numpy as np
import pytest

from gcfed.data.partition import IID, ByGroup, ClassesPerClient, Dirichlet, DirichletBalanced
from gcfed.data.skews import DirichletSizes, Shards

LABELS = np.random.default_rng(0).choice(7, 400, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.07, 0.03]) * 3
CLASSES = sorted(set(LABELS.tolist()))


def stream(seed):
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(b"partition"),)))
    )


def log_gammas(rng, alpha, shape):
    gammas = np.log(rng.standard_gamma(alpha + 1, shape))
    return gammas - rng.standard_exponential(shape) / alpha


def normalized(logs):
    weights = [np.exp(log - max(logs)) for log in logs]
    return np.array([w / sum(weights) for w in weights])


def cut(shares, size):
    """The number of samples of each client: its share is an interval of ``size``, after those of
    earlier clients.
    """
    ends = [int(np.floor(sum(shares[: k + 1]) / sum(shares) * size)) for k in range(len(shares))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def dealt(rng, wanted, labels, n):
    """Shuffles each class.

    Client 0 gets its first ``wanted[class][0]`` samples, client 1 the next ones, and so on.
    """
    owners = np.full(len(labels), -1)
    order = rng.permutation(len(labels)).tolist()
    for c, of_class in zip(CLASSES, wanted, strict=True):
        mine = [i for i in order if labels[i] == c]
        for k in range(n):
            for i in mine[sum(of_class[:k]) : sum(of_class[: k + 1])]:
                owners[i] = k
    return owners


def topped_up(rng, owners, n, least):
    """Reduces the largest clients to one size. If this frees too many samples, the first of these
    clients give one sample less. The samples are drawn, and so are the clients that receive them.
    """
    sizes = [int((owners == k).sum()) for k in range(n)]
    lacks = [max(least - size, 0) for size in sizes]
    level = max(
        h for h in range(least, max(sizes) + 1) if sum(max(s - h, 0) for s in sizes) >= sum(lacks)
    )
    gives = [max(size - level, 0) for size in sizes]
    for k in [k for k in range(n) if gives[k]][: sum(gives) - sum(lacks)]:
        gives[k] -= 1
    order = rng.permutation(len(owners)).tolist()
    given = [i for k in range(n) for i in [i for i in order if owners[i] == k][: gives[k]]]
    receivers = [k for k in range(n) for _ in range(lacks[k])]
    for i, k in zip(rng.permutation(given).astype(int).tolist(), receivers, strict=True):
        owners[i] = k
    return owners


def iid(rng, n):
    order = rng.permutation(len(LABELS)).tolist()
    owners = np.zeros(len(LABELS), int)
    for place, i in enumerate(order):
        owners[i] = place % n
    return owners


def dirichlet(rng, n, alpha, least, tries):
    for _ in range(tries):
        held = [0] * n
        wanted = []
        for c in CLASSES:
            logs = log_gammas(rng, alpha, (n,))
            shares = normalized(
                [log if h * n < len(LABELS) else -np.inf for log, h in zip(logs, held, strict=True)]
            )
            wanted.append(cut(shares, int((c == LABELS).sum())))
            held = [h + w for h, w in zip(held, wanted[-1], strict=True)]
        short = sum(h < least for h in held)
        if not short or short > 10 + 3 * np.log(tries):
            break
    owners = dealt(rng, wanted, LABELS, n)
    return topped_up(rng, owners, n, least) if short else owners


def balanced(rng, n, alpha):
    left = [int((c == LABELS).sum()) for c in CLASSES]
    logs = log_gammas(rng, alpha, (n, len(CLASSES)))
    wanted = np.zeros((n, len(CLASSES)), int)
    missing = [len(LABELS) // n] * n
    while any(missing):
        asking = [k for k in range(n) if missing[k]]
        there = [c for c, m in enumerate(left) if m]
        mixes = np.array([normalized(logs[k][there]) for k in asking])
        asked = rng.multinomial([missing[k] for k in asking], mixes)
        for j, c in enumerate(there):
            if sum(asked[:, j]) > left[c]:
                asked[:, j] = rng.multivariate_hypergeometric(
                    asked[:, j], left[c], method="marginals"
                )
        for i, k in enumerate(asking):
            for j, c in enumerate(there):
                wanted[k, c] += asked[i, j]
                missing[k] -= int(asked[i, j])
                left[c] -= int(asked[i, j])
    return dealt(rng, wanted.T.tolist(), LABELS, n)


def classes_each(rng, n, m):
    dealt_classes = []
    hands = []
    if m == 1:
        hands = [[k % len(CLASSES)] for k in range(n)]
    else:
        # a client gets no class twice: such classes go to the end
        while len(dealt_classes) < n * m:
            deck = rng.permutation(len(CLASSES)).tolist()
            begun = dealt_classes[len(dealt_classes) // m * m :]
            dealt_classes += [c for c in deck if c not in begun] + [c for c in deck if c in begun]
        hands = [dealt_classes[k * m : (k + 1) * m] for k in range(n)]
    wanted = np.zeros((len(CLASSES), n), int)
    for c in range(len(CLASSES)):
        holders = [k for k in range(n) if c in hands[k]]
        size = int((CLASSES[c] == LABELS).sum())
        for i, k in enumerate(holders):
            wanted[c, k] = size // len(holders) + (i < size % len(holders))
    return dealt(rng, wanted.tolist(), LABELS, n)


def shards(rng, n, m):
    order = rng.permutation(len(LABELS)).tolist()
    in_order = [i for c in CLASSES for i in order if LABELS[i] == c]
    owner_of = rng.permutation(n * m) // m
    owners = np.zeros(len(LABELS), int)
    for place, i in enumerate(in_order):
        owners[i] = owner_of[place * n * m // len(LABELS)]
    return owners


def sizes(rng, n, alpha, least):
    many = cut(normalized(log_gammas(rng, alpha, (n,))), len(LABELS))
    order = rng.permutation(len(LABELS)).tolist()
    owners = np.zeros(len(LABELS), int)
    for i, owner in zip(order, [k for k in range(n) for _ in range(many[k])], strict=True):
        owners[i] = owner
    return topped_up(rng, owners, n, least)


def groups(rng, n):
    kept = sorted(rng.choice(len(CLASSES), n, replace=False).tolist())
    places = []
    for label in LABELS.tolist():
        rank = CLASSES.index(label)
        places.append(kept.index(rank) if rank in kept else -1)
    return np.array(places)


LOOPS = [
    (IID(), iid, ()),
    (Dirichlet(0.3), dirichlet, (0.3, 1, 1000)),
    (Dirichlet(0.1, 4, 7), dirichlet, (0.1, 4, 7)),
    (Dirichlet(0.1, 9, 1), dirichlet, (0.1, 9, 1)),
    (Dirichlet(1e-6, 3, 2), dirichlet, (1e-6, 3, 2)),
    (DirichletBalanced(0.3), balanced, (0.3,)),
    (DirichletBalanced(1e-3), balanced, (1e-3,)),
    (ClassesPerClient(1), classes_each, (1,)),
    (ClassesPerClient(2), classes_each, (2,)),
    (ClassesPerClient(3), classes_each, (3,)),
    (Shards(1), shards, (1,)),
    (Shards(3), shards, (3,)),
    (DirichletSizes(0.2, 3), sizes, (0.2, 3)),
    (DirichletSizes(5.0), sizes, (5.0, 1)),
    (ByGroup(), groups, ()),
]


@pytest.mark.parametrize(
    ("partitioner", "loop", "arguments"), LOOPS, ids=[str(p) for p, *_ in LOOPS]
)
def test_a_partition_equals_the_plain_loop(partitioner, loop, arguments):
    for n in (1, 3, 31):
        if loop is groups and n > len(CLASSES):
            continue
        for seed in range(2):
            expected = loop(stream(seed), n, *arguments)
            found = partitioner(LABELS, n, seed=seed, groups=LABELS)
            assert all(
                found.client(k).tolist() == np.flatnonzero(expected == k).tolist() for k in range(n)
            )
            np.testing.assert_array_equal(found.owners(len(LABELS)), expected)
