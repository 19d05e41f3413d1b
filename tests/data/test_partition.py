import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import refuses

from gcfed.assemble import assemble
from gcfed.data.partition import (
    IID,
    ByGroup,
    ClassesPerClient,
    Dirichlet,
    DirichletBalanced,
    Partition,
    Partitioner,
)
from gcfed.data.skews import Rotation, Shards
from gcfed.utils.instantiate import build

LABELS = np.random.default_rng(0).permutation(np.arange(6000) % 10)


@pytest.mark.parametrize(
    ("labels", "num_clients", "partitioner"),
    [
        (LABELS, 6000, Dirichlet(0.05)),
        (LABELS, 100, Dirichlet(1e-18)),
        (np.array([3]), 1, Dirichlet(0.1)),
        (np.repeat([0, 7], [1, 999]), 999, Dirichlet(0.05)),
        (np.arange(500), 400, Dirichlet(0.1)),  # each sample has its own class
    ],
)
def test_dirichlet_terminates_in_hard_cases(labels, num_clients, partitioner):
    partition = partitioner(labels, num_clients, seed=1)
    assert sorted(partition.indices.tolist()) == [*range(len(labels))]
    assert (len(partition.sizes), partition.sizes.min() >= partitioner.min_size) == (
        num_clients,
        True,
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: IID()(LABELS, 6001, seed=1),
            "num_clients=6001 needs 6001 training samples, and there are 6000",
        ),
        (
            lambda: Dirichlet(0.1, min_size=61)(LABELS, 100, seed=1),
            "participation.num_clients=100.*partition.min_size",
        ),
        (
            lambda: ClassesPerClient(11)(LABELS, 10, seed=1),
            "partition.classes=11 exceeds the 10 classes",
        ),
        (
            lambda: ClassesPerClient(1)(np.array([0, 0, 0, 1]), 4, seed=1),
            "partition.classes=1: class 1 has fewer samples",
        ),
        (
            lambda: Shards(2)(LABELS, 3001, seed=1),
            "participation.num_clients=3001 needs 6002 training samples",
        ),
        (lambda: Rotation(IID(), [45]), r"^degrees.0=45 must be 0, 90, 180 or 270"),
        (lambda: Rotation(IID()).shifted(PIXELS[:, :, :2], *CLIENTS), "rotates square images"),
        (
            lambda: ByGroup()(LABELS, None),
            "partition=natural needs client groups.* partition.by=<column> .csv",
        ),
        (
            lambda: ByGroup()(LABELS, 11, groups=LABELS),
            "participation.num_clients=11, but there are 10 groups",
        ),
    ],
)
def test_impossible_partitions_are_refused_by_name(make, words):
    with refuses(words):
        make()


def test_clients_that_got_samples_of_others_are_counted(caplog):
    caplog.set_level("INFO")
    found = Dirichlet(0.01, max_tries=1)(np.arange(40) % 2, 20, seed=1)
    assert found.sizes.min() == 1
    (said,) = caplog.messages
    assert re.fullmatch(
        r"Dirichlet\(0\.01\): \d+ of 20 clients had too few samples and got others'", said
    )


def test_clients_that_are_left_out_are_counted_with_the_remedy(caplog):
    caplog.set_level("INFO")
    ByGroup()(np.zeros(6), None, groups=np.array([0, 0, 1, 1, 2, 2]))
    assert not caplog.messages
    ByGroup()(np.zeros(6), 1, groups=np.array([0, 0, 1, 1, 2, 2]))
    (said,) = caplog.messages
    assert said == (
        "1 of 3 groups are clients; 4 samples have no client. participation.num_clients=null takes"
        " all"
    )


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 4), np.uint8)
CLIENTS = (np.array([0, 1, 2, 3, 4, -1]), 5, np.random.default_rng(0))


def quarters(seen, plain):
    """The number of quarter turns of each image, [n]."""
    matches = np.stack([(np.rot90(plain, q, (-2, -1)) == seen).all((1, 2, 3)) for q in range(4)])
    assert matches.any(0).all()
    return matches.argmax(0)


def test_the_direction_of_rotation():
    pixels = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3)
    rotation = Rotation(IID(), [90])
    ((seen,),) = rotation.shifted(pixels, np.array([0]), 1, np.random.default_rng(0))
    # right becomes top
    assert seen.tolist() == [[3, 6, 9], [2, 5, 8], [1, 4, 7]]


def test_a_shift_changes_all_tests_and_does_not_depend_on_classes(config):
    overrides = (
        "data=synthetic",
        "partition=rotation",
        "partition.of._target_=gcfed.data.partition.ClassesPerClient",
        "data.client_test=0.2",
        "data.validation=0.1",
        "participation.num_clients=320",
        "data.dataset.num_train=3200",
        "data.dataset.num_test=400",
    )
    runs = []
    cfg = config(*overrides)
    for degrees, seed in (([0], 1), ([0, 90, 180, 270], 1), ([0, 90, 180, 270], 2)):
        cfg.partition.degrees = degrees
        cfg.seed = seed
        runs.append(build(cfg.data))
        runs[-1].setup()
    plain, once, again = runs
    assert not set(once.partition.indices) & set(once.tests_of_clients.indices)
    group_n = quarters(once._train[0].numpy(), plain._train[0].numpy())
    group_N = np.zeros(320, np.int64)
    for k in range(320):
        held = np.concatenate([of.client(k) for of in (once.partition, once.tests_of_clients)])
        (group_N[k],) = set(group_n[held])
        assert len(set(once.labels[held])) == 1
    assert (np.bincount(group_N) == 80).all()
    other = quarters(again._train[0].numpy(), plain._train[0].numpy())
    assert [other[again.partition.client(k)[0]] for k in range(320)] != group_N.tolist()
    tests = []
    for a, b, c in zip(plain._tests, once._tests, again._tests, strict=True):
        assert torch.equal(b[0], c[0])
        tests.append(quarters(b[0].numpy(), a[0].numpy()))
        assert np.ptp(np.bincount(tests[-1], minlength=4)) <= 1
    for labels, of in ((once.labels, group_n), (once._tests[0][1].numpy(), tests[0])):
        assert len(set(zip(labels.tolist(), of.tolist(), strict=True))) == 4 * once.num_classes


def test_client_is_a_view_and_counts_are_exact():
    partition = Partition.from_owners(np.array([1, -1, 0, 1, 3]), 4)
    assert [partition.client(k).tolist() for k in range(4)] == [[2], [0, 3], [], [4]]
    assert np.shares_memory(partition.client(1), partition.indices)
    labels = np.array([2, 0, 1, 2, 0])
    np.testing.assert_array_equal(
        partition.label_counts(labels, 3), [[0, 1, 0], [0, 0, 2], [0, 0, 0], [1, 0, 0]]
    )
    np.testing.assert_array_equal(
        partition.label_counts(labels, 3, np.array([3, 1])), [[1, 0, 0], [0, 0, 2]]
    )


@pytest.mark.parametrize(
    ("share", "aside"),
    [(0.2, [0, 0, 0, 1, 2, 20]), (0.5, [0, 0, 1, 2, 4, 50]), (0.99, [0, 0, 1, 3, 8, 99])],
)
def test_a_share_of_each_client_is_set_aside(share, aside):
    sizes = [0, 1, 2, 4, 9, 100]
    whole = Partition.from_owners(
        np.random.default_rng(0).permutation(np.repeat(np.arange(6), sizes)), 6
    )
    kept, test = whole.parted(share, seed=1)
    assert test.sizes.tolist() == aside
    assert kept.sizes.tolist() == [n - m for n, m in zip(sizes, aside, strict=True)]
    for k in range(6):
        np.testing.assert_array_equal(np.sort([*kept.client(k), *test.client(k)]), whole.client(k))
        assert (np.diff(test.client(k)) > 0).all()
    assert share == 0.99 or not np.array_equal(test.indices, whole.parted(share, seed=2)[1].indices)
    np.testing.assert_array_equal(test.indices, whole.parted(share, seed=1)[1].indices)


@pytest.mark.parametrize(
    "partitioner", [Dirichlet(0.1), DirichletBalanced(0.3), ClassesPerClient(2)]
)
def test_partitions_by_class_take_targets_in_bins_of_equal_size(partitioner):
    y = np.random.default_rng(2).lognormal(size=1000)
    bins = np.repeat(np.arange(10), 100)[y.argsort().argsort()]
    ours = partitioner(y[:, None], 20, seed=1)
    np.testing.assert_array_equal(ours.owners(1000), partitioner(bins, 20, seed=1).owners(1000))
    coarse = replace(partitioner, bins=2)(y[:, None], 20, seed=1)
    np.testing.assert_array_equal(
        coarse.owners(1000), partitioner(bins // 5, 20, seed=1).owners(1000)
    )
    # equal targets are in one bin
    ties = partitioner(np.minimum(y, np.sort(y)[500])[:, None], 20, seed=1)
    merged = partitioner(np.minimum(bins, 5), 20, seed=1)
    np.testing.assert_array_equal(ties.owners(1000), merged.owners(1000))
    with refuses("needs one class per sample"):
        partitioner(np.ones((1000, 2)), 20, seed=1)


def test_shards_of_targets_are_ranges_of_their_values(config):
    y = np.random.default_rng(2).lognormal(size=1000)
    partition = Shards(1)(y[:, None], 20, seed=1)
    order = y.argsort()
    held = {frozenset(partition.client(k).tolist()) for k in range(20)}
    assert held == {frozenset(shard.tolist()) for shard in np.split(order, 20)}
    words = (
        "data=matrix_regression",
        "data.num_classes=1",
        "model=linear",
        "data.dataset.samples=20",
    )
    data = build(config(*words, "partition=shards", "partition.shards=1").data)
    data.setup()
    ends = sorted(
        (y.min(), y.max()) for y in (data.labels[data.partition.client(k)] for k in range(20))
    )
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


class Own(Partitioner):
    """A user's partition: ``made`` computes the owners from the number of samples."""

    def owners(self, labels, num_clients, rng):
        return self.made(len(labels))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda n: np.arange(n) % 4,
            r"Own leaves 1 of 5 clients without a sample, such as client 4: give",
        ),
        (
            lambda n: np.arange(n) % 6,
            r"Own\.owners must return integers \[1437\], of clients 0 … 4, .*: it ",
        ),
        (lambda n: None, r"Own\.owners must return .*: it returned None\.$"),
    ],
)
def test_an_invalid_partition_of_a_users_partitioner_is_refused_by_name(
    config, monkeypatch, made, words
):
    monkeypatch.setattr(Own, "made", staticmethod(made), raising=False)
    mine = ("partition=iid", f"partition._target_={__name__}.Own", "participation.num_clients=5")
    with refuses(rf"^partition: {words}"):
        assemble(config(*mine))
