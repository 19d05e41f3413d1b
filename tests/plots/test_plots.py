"""The pictures of a run show its data."""

import re
from dataclasses import replace

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from gcfed.folders.measures import smooth
from gcfed.plots.pictures import (
    draw_partition,
    plot_curves,
    plot_partition,
)
from gcfed.plots.style import axis_label
from gcfed.utils.instantiate import build


def test_curves_hold_the_data(tmp_path):
    t = pd.RangeIndex(1, 31, name="round")
    path = tmp_path / "new" / "curves.png"
    table = pd.DataFrame(
        {"train/loss": 2 / t, "test/loss": 3 / t, "test/acc": t / (t + 20) + 0.01 * (t % 2)},
        index=t,
    )
    table.loc[t % 3 != 0, ["test/loss", "test/acc"]] = np.nan  # every third round has a test
    tests = table.dropna()
    accuracy, loss = plot_curves(table, path).axes
    raw, smoothed = accuracy.lines
    np.testing.assert_array_equal(raw.get_xdata(), tests.index)
    np.testing.assert_allclose(raw.get_ydata(), 100 * tests["test/acc"])
    np.testing.assert_allclose(smoothed.get_ydata(), 100 * smooth(tests["test/acc"]))
    for line, column in zip(loss.lines, ("train/loss", "test/loss"), strict=True):
        np.testing.assert_allclose(line.get_ydata(), table[column].dropna())
    assert matplotlib.image.imread(path).std() > 0.02


@pytest.mark.parametrize(
    ("tests", "drawn", "label", "scales"),
    [
        (
            {"test/rmse": [3, 2], "test/relative_error": [0.5, 0.01]},
            [0.5, 0.01],
            "relative error",
            ["log", "linear"],
        ),
        (
            {"test/loss": [0.5, -2.0], "test/r2": [-0.5, 0.9]},
            [-0.5, 0.9],
            "test/r2",
            ["linear", "linear"],
        ),
    ],
)
def test_a_regression_shows_its_own_measure_instead_of_the_accuracy(
    tests, drawn, label, scales, tmp_path, unrendered
):
    table = pd.DataFrame({"train/loss": [4.0, 3.0], "test/loss": [3.0, 2.0], **tests}, index=[1, 2])
    error, loss = plot_curves(table, tmp_path / "curves.png").axes
    assert [list(line.get_ydata()) for line in error.lines] == [drawn]
    assert [list(line.get_ydata()) for line in loss.lines] == [
        list(table["train/loss"]),
        list(table["test/loss"]),
    ]
    assert error.get_ylabel() == label
    assert [axes.get_yscale() for axes in (error, loss)] == scales
    for axes in (error, loss):
        low, high = axes.get_ylim()
        assert all(low < y < high for line in axes.lines for y in line.get_ydata())
    assert ("squared error" in loss.get_ylabel()) == ("test/rmse" in tests)


def test_a_failed_write_leaves_the_old_picture(tmp_path, monkeypatch):
    def half(figure, file, **_):
        file.write_bytes(b"half")
        raise OSError(28, "disk full")

    path = tmp_path / "curves.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        plot_curves(pd.DataFrame(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_partition_holds_the_data(tmp_path):
    counts_NC = np.random.default_rng(0).integers(-30, 30, size=(12, 7), endpoint=True).clip(0)
    bars, bubbles = plot_partition(counts_NC, tmp_path / "partition.png", title="α = 0.1").axes
    assert [bar.get_height() for bar in bars.patches] == counts_NC.sum(axis=1).tolist()
    assert bars.get_title() == "α = 0.1"
    points = bubbles.collections[0]
    drawn_NC = np.zeros_like(counts_NC, dtype=float)
    drawn_NC[tuple(points.get_offsets().data.astype(int).T)] = points.get_sizes()
    np.testing.assert_allclose(drawn_NC / drawn_NC.max(), counts_NC / counts_NC.max())


def test_a_run_draws_50_of_many_clients_with_the_names_of_the_classes(config, tmp_path, unrendered):
    data = build(
        config("data.limit_train=400", "participation.num_clients=100", "partition.min_size=1").data
    )
    data.setup()
    data.dataset = replace(data.dataset, class_names=tuple("abcdefghij"))
    held = data.partition.label_counts(data.labels, 10)
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gcfed.plots.pictures.save", lambda figure, path: drawn.append(figure))
        draw_partition(data, held, tmp_path / "partition.png")
    bars, bubbles = drawn[0].axes
    assert re.fullmatch(
        r"digits: 100 clients, Dirichlet, α = 0.1\nlabel skew: Hellinger 0\.\d\d, Jensen–Shannon"
        r" 0\.\d\d",
        bars.get_title(),
    )
    assert [bar.get_height() for bar in bars.patches] == held.sum(axis=1).tolist()[::2]
    assert [label.get_text() for label in bubbles.get_xticklabels()][:3] == ["0", "6", "12"]
    assert [label.get_text() for label in bubbles.get_yticklabels()] == [*"abcdefghij"]
    assert "50 of 100" in bubbles.get_xlabel()


@pytest.mark.parametrize(
    ("column", "label"),
    [
        ("test/acc", "test accuracy (%)"),
        ("val/acc", "validation accuracy (%)"),
        ("personal/local_std", "personal/local_std (%)"),
        ("comm/up_bytes", "sent by clients (bytes)"),
        ("drift/cosine", "drift/cosine"),
    ],
)
def test_an_axis_names_the_unit_of_its_column(column, label):
    assert axis_label(column) == label
