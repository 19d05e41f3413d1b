import csv

import matplotlib.image
import numpy as np
import pytest

from gcfed.metrics.convergence import smooth
from gcfed.report import style
from gcfed.report.figures import plot_curves, plot_partition


def curve_rows(rounds: int = 30) -> list[dict]:
    """As a CSV logger writes them: train and test in rows of their own, a test every third round."""
    rows: list[dict] = []
    for t in range(1, rounds + 1):
        rows.append({"round": t, "train/loss": 2.0 / t, "test/loss": "", "test/acc": None})
        if t % 3 == 0:
            rows.append({"round": t, "train/loss": "", "test/loss": 3.0 / t, "test/acc": t / (t + 20) + 0.01 * (t % 2)})
    return rows


def counts(clients: int, classes: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.poisson(rng.exponential(30, size=(clients, classes)) * rng.integers(0, 2, size=(clients, classes)))


def read(path) -> np.ndarray:
    image = matplotlib.image.imread(path)
    assert image.std() > 0.02, "an empty picture"
    return image


def test_curves_hold_the_data(tmp_path):
    rows = curve_rows()
    accuracy, loss = plot_curves(rows, tmp_path / "new" / "curves.png").axes
    tests = [row for row in rows if row["test/acc"]]
    percent = np.array([100 * row["test/acc"] for row in tests])
    raw, smoothed, best = accuracy.lines
    np.testing.assert_array_equal(raw.get_xdata(), [row["round"] for row in tests])
    np.testing.assert_allclose(raw.get_ydata(), percent)
    np.testing.assert_allclose(smoothed.get_ydata(), smooth(percent))
    assert best.get_xydata().tolist() == [[tests[percent.argmax()]["round"], percent.max()]]
    train, test = loss.lines
    np.testing.assert_allclose(train.get_ydata(), [2.0 / t for t in range(1, 31)])
    np.testing.assert_allclose(test.get_ydata(), [row["test/loss"] for row in tests])
    assert "%" in accuracy.get_ylabel()
    height, width, _ = read(tmp_path / "new" / "curves.png").shape
    assert 400 < height < width < 2500
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["curves.png"]


def test_curves_from_a_csv_file_are_the_same(tmp_path):
    rows = curve_rows()
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0])
        writer.writeheader()
        writer.writerows(rows)
    plot_curves(rows, tmp_path / "a.png")
    plot_curves(tmp_path / "metrics.csv", tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"round": 1, "train/loss": 0.5}],
        [{"round": 1, "test/acc": 0.5}],
        [{"step": 3, "lr": 0.1}, {"round": 1, "test/acc": float("nan"), "test/loss": "nan"}],
    ],
)
def test_little_or_nothing_to_draw(rows, tmp_path):
    plot_curves(rows, tmp_path / "curves.png")
    read(tmp_path / "curves.png")


@pytest.mark.parametrize("measured", [True, False])
def test_a_regression_has_no_accuracy_to_draw(measured, tmp_path):
    rows = [{"round": t, "train/loss": 2.0 / t, "test/loss": 3.0 / t} for t in (1, 2, 3)]
    if measured:
        rows = [row | {"test/relative_error": 0.5 ** row["round"]} for row in rows]
    error, loss = plot_curves(rows, tmp_path / "curves.png").axes
    assert [list(line.get_ydata()) for line in error.lines] == [[0.5, 0.25, 0.125]] * measured
    assert "acc" not in error.get_ylabel()
    assert "squared error" in loss.get_ylabel()


def test_partition_holds_the_data(tmp_path):
    counts_NC = counts(12, 7)
    bars, bubbles = plot_partition(counts_NC, tmp_path / "partition.png", title="α = 0.1").axes
    assert [bar.get_height() for bar in bars.patches] == counts_NC.sum(axis=1).tolist()
    assert bars.get_title() == "α = 0.1"
    points = bubbles.collections[0]
    drawn_NC = np.zeros_like(counts_NC, dtype=float)
    drawn_NC[tuple(points.get_offsets().data.astype(int).T)] = points.get_sizes()
    np.testing.assert_allclose(drawn_NC / drawn_NC.max(), counts_NC / counts_NC.max())
    read(tmp_path / "partition.png")


def test_many_clients_are_thinned_and_the_label_says_so(tmp_path):
    counts_NC = counts(1030, 10)
    figures = [plot_partition(counts_NC, tmp_path / f"{i}.png", max_clients=40) for i in range(2)]
    bars, bubbles = figures[0].axes
    heights = [bar.get_height() for bar in bars.patches]
    shown = [i * 1030 // 40 for i in range(40)]
    assert heights == counts_NC.sum(axis=1)[shown].tolist()
    assert [int(label.get_text()) for label in bubbles.get_xticklabels()] == shown[::2]
    assert "40 of 1,030" in bubbles.get_xlabel()
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()


@pytest.mark.parametrize("shape", [(1, 1), (1, 10), (3, 200), (60, 2)])
def test_partition_of_any_shape(shape, tmp_path):
    plot_partition(np.full(shape, 5), tmp_path / "partition.png")
    height, width, _ = read(tmp_path / "partition.png").shape
    assert max(height, width) < 2500


def test_partition_without_samples_and_without_clients(tmp_path):
    plot_partition(np.zeros((3, 4), dtype=int), tmp_path / "partition.png")
    with pytest.raises(ValueError, match="label_counts"):
        plot_partition(np.zeros((0, 4), dtype=int), tmp_path / "none.png")


def test_a_failed_write_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    plot_curves(curve_rows(), path)
    before = path.read_bytes()

    def half(figure, file):
        file.write_bytes(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr(style, "render", half)
    with pytest.raises(OSError, match="disk full"):
        plot_curves([], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
