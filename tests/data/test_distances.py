"""The distance between clients' mean inputs, against a computation by hand."""

import numpy as np
import pytest

from gcfed.data.distances import feature_distance, label_skew
from gcfed.data.partition import Partition
from gcfed.folders.reading import read_summary
from gcfed.run import train

FAST = ("rounds=1", "client.epochs=1", "data.limit_train=400", "data.limit_test=40")


def dealt(*sizes):
    owner_n = np.repeat(np.arange(len(sizes)), sizes)
    return Partition.from_owners(owner_n, len(sizes))


def test_two_clients_by_hand():
    """Three samples of client 0 are (0, 5), one of client 1 is (4, 5).

    The first coordinate has the mean 1 and the deviation √3, the second one does not vary. The
    distances are 1/√3 and 3/√3.
    """
    x = np.array([[0, 5], [0, 5], [0, 5], [4, 5]], np.float32)
    assert feature_distance(x, dealt(3, 1)) == pytest.approx(2 / np.sqrt(3), rel=1e-12)
    # units, and a constant added to all samples, change nothing
    shifted = x.astype(np.float64) * 1e-3 + 1e6
    assert feature_distance(shifted, dealt(3, 1)) == pytest.approx(2 / np.sqrt(3), rel=1e-5)


def test_equal_clients_have_the_distance_0_and_random_ones_that_of_their_size():
    images = np.random.default_rng(1).integers(0, 256, (50, 3, 8, 8)).astype(np.uint8)
    assert feature_distance(np.concatenate([images, images]), dealt(50, 50)) == 0
    many = np.random.default_rng(2).standard_normal((4000, 30))
    assert feature_distance(many, dealt(*[50] * 80)) == pytest.approx(1 / np.sqrt(50), rel=0.05)


def test_a_client_without_samples_does_not_count_and_constants_have_no_distance():
    x = np.array([[0.0], [0.0], [2.0], [2.0]])
    assert feature_distance(x, dealt(2, 0, 2)) == 1
    assert feature_distance(np.full((4, 3), 0.1), dealt(2, 2)) is None
    assert feature_distance(x[:0], dealt(0, 0)) is None


def test_it_reads_a_bounded_part_of_a_large_data_set():
    """500 clients with 300 samples each, whose values are the client's number modulo 2."""
    owner_n = np.repeat(np.arange(500), 300)
    read = []

    class Counted(np.ndarray):
        def __getitem__(self, index):
            read.append(len(index))
            return np.asarray(super().__getitem__(index))

    x = np.stack([owner_n % 2, owner_n % 2], 1).astype(np.float64).view(Counted)
    assert feature_distance(x, Partition.from_owners(owner_n, 500)) == pytest.approx(1, abs=0.02)
    assert read == [100] * 200


def test_coordinates_of_large_images_are_sampled_over_the_whole_image():
    """The clients differ in the last third of the pixels only."""
    x = np.zeros((4, 3, 40, 40), np.uint8)
    x[2:, 2] = 9
    x[::2, :2] = 1
    assert feature_distance(x, dealt(2, 2)) == pytest.approx(np.sqrt(1 / 3), abs=1e-3)


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_a_run_has_it_in_its_summary_with_its_noise(config, tmp_path, partition):
    words = (*FAST, f"partition={partition}")
    distances = []
    for noise in ("null", "3.0"):
        folder = tmp_path / noise
        train(config(*words, f"data.feature_noise={noise}", folder=folder))
        distances.append(read_summary(folder / "summary.json")["partition/feature_distance"])
    plain, noisy = distances
    assert 0 < plain < 1
    assert noisy != plain


def test_texts_have_none(config, tmp_path):
    rng = np.random.default_rng(1)
    tokens = {"x": rng.integers(0, 50, (60, 8), np.int32), "y": rng.integers(0, 2, 60)}
    np.savez(tmp_path / "texts.npz", **tokens)
    words = ("data=arrays", f"data.path={tmp_path}/texts.npz", "model=gpt", "model.vocabulary=50")
    train(config(*words, "participation.num_clients=6", "partition=iid", "rounds=1"))
    assert "partition/feature_distance" not in read_summary(tmp_path / "run" / "summary.json")


def test_label_skew_is_0_for_equal_clients_and_has_the_distances_of_scipy():
    distance = pytest.importorskip("scipy.spatial.distance")
    assert label_skew(np.array([[2, 4], [0, 0], [1, 2]])) == pytest.approx(
        {"partition/hellinger": 0, "partition/jensen_shannon": 0}, abs=1e-7
    )
    counts_NC = np.random.default_rng(1).integers(-5, 9, size=(6, 4)).clip(0)
    p_NC = counts_NC / counts_NC.sum(1, keepdims=True)
    q_C = counts_NC.sum(0) / counts_NC.sum()
    assert label_skew(counts_NC) == pytest.approx(
        {
            "partition/hellinger": np.mean(
                [distance.euclidean(p**0.5, q_C**0.5) / 2**0.5 for p in p_NC]
            ),
            "partition/jensen_shannon": np.mean([distance.jensenshannon(p, q_C, 2) for p in p_NC]),
        }
    )
