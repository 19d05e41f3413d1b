"""Label counts as a run leaves them, and partitions side by side."""

from types import SimpleNamespace

import numpy as np
import pytest
from run_folders import rows_of, write_run

from gcfed.data.label_counts import LABEL_COUNTS, LabelCounts, evenly, label_counts
from gcfed.data.partition import Partition
from gcfed.report.groups import grouped
from gcfed.report.partitions import CLIENTS, plot_partitions

pytestmark = pytest.mark.usefixtures("unrendered")


def held(num_clients=4, *, of=None, seed=0, classes=3):
    counts = np.random.default_rng(seed).integers(0, 9, size=(num_clients, classes))
    return LabelCounts(np.arange(num_clients) * ((of or num_clients) // num_clients), counts, of or num_clients)


def run_of(folder, counts=None, **config):
    run = write_run(folder, config={k.replace("__", "."): v for k, v in config.items()}, rows=rows_of([0.1]))
    if counts is not None:
        counts.save(folder)
    return run


def test_counts_come_back(tmp_path):
    held(of=40).save(tmp_path)
    back = LabelCounts.load(tmp_path)
    np.testing.assert_array_equal(back.counts, held().counts)
    assert back.clients.tolist() == [0, 10, 20, 30]
    assert back.of == 40
    assert LabelCounts.load(tmp_path / "none") is None
    (tmp_path / LABEL_COUNTS).write_bytes(b"PK half a file")
    assert LabelCounts.load(tmp_path) is None


def test_counts_of_many_clients_are_of_fifty():
    owners = np.repeat(np.arange(120), 2)
    labels = np.arange(240) % 2
    data = SimpleNamespace(
        labels=labels, num_classes=2, num_clients=120, partition=Partition.from_owners(owners, 120)
    )  # fmt: skip
    counts = label_counts(data)
    assert counts.clients.tolist() == [i * 120 // 50 for i in range(50)]
    assert (counts.counts == 1).all()
    assert counts.of == 120
    data.labels = labels.astype(np.float32)
    assert label_counts(data) is None


@pytest.mark.parametrize(("n", "most", "ids"), [(3, 5, [0, 1, 2]), (5, 5, [0, 1, 2, 3, 4]), (100, 4, [0, 25, 50, 75])])
def test_evenly(n, most, ids):
    assert evenly(n, most).tolist() == ids


def test_partitions_side_by_side(tmp_path):
    """By rising α, on one scale, each of the lowest seed; two methods share theirs."""
    runs = [
        run_of(tmp_path / "a", held(seed=1), partition__alpha=1.0),
        run_of(tmp_path / "b", held(seed=2), partition__alpha=0.05, seed=2),
        run_of(tmp_path / "c", held(seed=3), partition__alpha=0.05, seed=1, tags__gc="gcfed"),
    ]
    figure = plot_partitions(grouped(runs), tmp_path / "a.png").figure
    bars = [figure.axes[i] for i in (0, 1)]
    bubbles = [figure.axes[i] for i in (2, 3)]
    assert [ax.get_title() for ax in bars] == ["α 0.05", "α 1"]
    for ax, dots, seed in zip(bars, bubbles, (3, 1), strict=True):
        counts = held(seed=seed).counts
        assert [bar.get_height() for bar in ax.patches] == counts.sum(1).tolist()
        points = dots.collections[0]
        drawn = np.zeros_like(counts, dtype=float)
        drawn[tuple(points.get_offsets().data.astype(int).T)] = points.get_sizes()
        np.testing.assert_allclose(drawn / drawn.max(), counts / counts.max())


def test_the_scale_is_common(tmp_path):
    """Though the clients of the second lie so close that its bubbles would have to be smaller."""
    few = LabelCounts(np.arange(2), np.array([[8, 0], [0, 2]]), 2)
    many = LabelCounts(np.arange(20), np.full((20, 2), 4), 20)
    runs = [run_of(tmp_path / str(a), counts, partition__alpha=a) for a, counts in ((0.1, few), (0.5, many))]
    axes = plot_partitions(grouped(runs), tmp_path / "a.png").figure.axes[2:]
    left, right = (ax.collections[0].get_sizes() for ax in axes)
    np.testing.assert_allclose(left / right[0], [2, 0.5])


def test_of_many_clients_some_are_drawn(tmp_path):
    drawn = plot_partitions(grouped([run_of(tmp_path / "a", held(50, of=1000))]), tmp_path / "a.png")
    assert len(drawn.figure.axes[0].patches) == CLIENTS
    assert f"{CLIENTS} of 1,000 clients are drawn" in drawn.caption


def test_runs_without_counts_show_sizes(tmp_path):
    run = run_of(tmp_path / "a")
    Partition.from_owners(np.array([0, 0, 1, 2, 2, 2]), 3).save(run.folder / "partition.npz")
    (axes,) = plot_partitions(grouped([run]), tmp_path / "a.png").figure.axes
    heights = {tuple(vertex) for vertex in axes.collections[0].get_paths()[0].vertices}
    assert {y for _, y in heights} == {0, 1, 2, 3}
    assert "3 in all" in axes.get_xlabel()
    assert plot_partitions(grouped([run_of(tmp_path / "b")]), tmp_path / "b.png") is None
