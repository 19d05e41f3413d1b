"""Noise of clients: its definition, and the samples that it changes."""

import numpy as np
import pytest
import torch

from gcfed.assemble import assemble
from gcfed.data.noise import noisy_labels, noisy_samples
from gcfed.data.partition import Partition
from gcfed.utils.instantiate import build
from gcfed.utils.rng import generator

NOISE = ("data.feature_noise=0.3", "data.label_noise=[0.7,0.5]")


def dealt(num_clients, each):
    """Gives ``each`` samples to each client, in random order.

    The same number of samples has no owner.
    """
    owner_n = np.random.default_rng(0).permutation(np.repeat(np.arange(-1, num_clients), each))
    return Partition.from_owners(owner_n, num_clients), owner_n


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_client_k_of_n_has_noise_of_deviation_sigma_k_by_n(dtype):
    partition, owner_n = dealt(4, 50)
    x = np.full((250, 1, 20, 20) if dtype == np.uint8 else (250, 400), 128, dtype)
    noise = noisy_samples(x, partition, 0.1, seed=1).astype(float) - 128
    assert (x == 128).all()
    assert (noise[owner_n == -1] == 0).all()
    unit = 255 if dtype == np.uint8 else 1
    rounding = 1 / 12 if dtype == np.uint8 else 0
    for k in range(4):
        drawn = noise[owner_n == k]
        assert drawn.var() == pytest.approx((unit * 0.1 * (k + 1) / 4) ** 2 + rounding, rel=0.03)
        plain = (
            generator(1, "feature_noise", k).standard_normal(drawn.shape, np.float32)
            * unit
            * 0.1
            * (k + 1)
            / 4
        )
        # one stream per client
        np.testing.assert_allclose(drawn, plain, atol=0.5 + 1e-4 if unit > 1 else 1e-4)


def test_pixels_stay_in_their_range():
    x = np.full((10, 3, 8, 8), 250, np.uint8)
    noisy = noisy_samples(x, Partition.from_owners(np.zeros(10, int), 1), 1.0, seed=1)
    assert noisy.min() == 0
    assert noisy.max() == 255
    assert (noisy == 255).mean() == pytest.approx(0.5, abs=0.05)  # 256 does not become 0


@pytest.mark.parametrize(("probability", "least"), [(1, 0.5), (0.6, 0.0), (0.3, 1.0), (0, 0.5)])
def test_a_noisy_client_has_a_share_of_wrong_labels(probability, least):
    partition, owner_n = dealt(1000, 40)
    y = np.random.default_rng(1).integers(0, 5, len(owner_n))
    noisy = noisy_labels(y, 5, partition, (probability, least), seed=1)
    # so runs can continue
    assert np.array_equal(noisy, noisy_labels(y, 5, partition, (probability, least), seed=1))
    assert np.array_equal(noisy[owner_n == -1], y[owner_n == -1])
    shares = np.array([(noisy != y)[partition.client(k)].mean() for k in range(1000)])
    hit = shares[shares > 0]
    assert len(hit) == pytest.approx(1000 * probability, abs=50)
    if len(hit):
        assert hit.min() >= least  # 40 · least is a whole number
        assert hit.mean() == pytest.approx((least + 1) / 2, abs=0.03)
    moved = (noisy - y)[noisy != y] % 5
    np.testing.assert_allclose(
        np.bincount(moved, minlength=5)[1:] / max(len(moved), 1), 0.25 * (len(hit) > 0), atol=0.02
    )


def test_only_clients_samples_are_noisy_and_their_tests_have_true_labels(config):
    """Noise changes neither the partition nor the choice of the held-out samples."""
    words = (
        "partition=dirichlet",
        "data.validation=0.1",
        "data.client_test=0.3",
        "data.limit_train=600",
    )
    plain, noisy = (build(config(*words, *noise).data) for noise in ((), NOISE))
    for data in (plain, noisy):
        data.setup()
    assert np.array_equal(plain.partition.indices, noisy.partition.indices)
    # the test split and the validation split
    for a, b in zip(plain._tests, noisy._tests, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    aside = noisy.tests_of_clients.indices
    kept = noisy.partition.indices
    x_changed = (plain._train[0] != noisy._train[0]).flatten(1).any(1).numpy()
    y_changed = plain.labels != noisy.labels
    assert x_changed[aside].all()
    assert x_changed[kept].all()
    assert not y_changed[aside].any()
    assert 0.3 < y_changed[kept].mean() < 0.9
    assert torch.equal(noisy._train[1], torch.from_numpy(noisy.labels))
    assert (
        noisy.class_counts(np.arange(20)).sum(0).tolist()
        == np.bincount(noisy.labels[kept], minlength=10).tolist()
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ["data.label_noise=[0.5,0.5]", "data=matrix_regression", "model=linear"],
            r"^data\.label_noise=\[0\.5, 0\.5\] ",
        ),
        (["data.label_noise=[0.5]"], r"data\.label_noise=\[0\.5\]"),
        (["data.label_noise=[2,0.5]"], r"data\.label_noise\.0=2 "),
        (["data.feature_noise=-1"], r"data\.feature_noise=-1"),
        (
            [
                "data.feature_noise=1",
                "data=matrix_regression",
                "model=linear",
                "metrics=relative_error",
            ],
            r"remove data\.feature_noise",
        ),
    ],
)
def test_invalid_noise_is_refused_with_its_key(config, words, match):
    with pytest.raises(ValueError, match=match):
        assemble(config(*words))


def test_texts_are_refused_before_the_first_round():
    for tokens in (np.uint8, np.int32):  # LEAF's characters, a tokenizer's tokens
        with pytest.raises(ValueError, match=r"^data\.feature_noise=0\.1 .* not for texts"):
            noisy_samples(
                np.zeros((4, 80), tokens), Partition.from_owners(np.zeros(4, int), 1), 0.1, seed=1
            )
    with pytest.raises(ValueError, match=r"^data\.label_noise=\[0\.5, 0\.1\] "):
        noisy_labels(
            np.zeros((4, 80), int),
            80,
            Partition.from_owners(np.zeros(4, int), 1),
            (0.5, 0.1),
            seed=1,
        )
