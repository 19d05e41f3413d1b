import matplotlib.image
import numpy as np
import pytest

from gcfed.report.surface import contour_levels, plot_surface

NAMES = ["client 4", "client 7", "client 9", "mean", "broadcast", "global"]


def surface(loss=None, **more):
    x, y = np.linspace(-1, 2, 7), np.linspace(0, 3, 7)
    bowl = (x[None] - 0.5) ** 2 + 2 * (y[:, None] - 1.5) ** 2 + 1
    points = np.array([(0, 0.5), (1.5, 0.5), (0.4, 2.5), (0.63, 1.17), (0.5, 1), (0.8, 1.4)])
    return {
        "x": x, "y": y, "loss": bowl if loss is None else loss, "acc": bowl, "round": np.array(50),
        "split": np.array("test"), "names": np.array(NAMES), "points": points, "point_loss": np.arange(1.0, 7.0),
        "distance": np.array([0, 0, 0, 0, 0.25, np.nan]),
    } | more  # fmt: skip


def lines_of(axes):
    (contours,) = (c for c in axes.collections if hasattr(c, "levels"))
    return contours


def test_contours_and_points_are_where_they_belong(tmp_path):
    found = surface()
    (axes,) = plot_surface(found, tmp_path / "new" / "surface.png").axes
    np.testing.assert_allclose([line.get_xydata()[0] for line in axes.lines], found["points"])
    contours = lines_of(axes)
    assert len(contours.levels) > 5
    for level, path in zip(contours.levels, contours.get_paths(), strict=True):
        for x, y in path.vertices:  # between two nodes the contour is a chord of the bowl
            assert (x - 0.5) ** 2 + 2 * (y - 1.5) ** 2 + 1 == pytest.approx(level, abs=0.2)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == "w₁, client 4: 1"
    assert labels[3:] == ["their mean: 4", "broadcast model: 5,\n0.25 off the plane", "new global model: 6"]
    assert [text.get_text() for text in axes.texts if text.get_text().startswith("w")] == ["w₁", "w₂", "w₃"]
    assert axes.get_title() == "Test loss (nats) around three clients of round 50"
    assert axes.get_aspect() == 1
    assert "distance" in axes.get_xlabel()
    picture = matplotlib.image.imread(tmp_path / "new" / "surface.png")
    assert picture.std() > 0.02
    assert max(picture.shape) < 1600


def test_levels_are_even_or_in_equal_ratios():
    even = contour_levels(np.array([1.0, 3.0, 5.0]))
    np.testing.assert_allclose(np.diff(even, 2), 0, atol=1e-12)
    ratios = contour_levels(np.array([0.01, 3.0, 50.0]))
    np.testing.assert_allclose(np.diff(np.log(ratios), 2), 0, atol=1e-9)
    assert 0.01 < ratios[0] < ratios[-1] < 50
    assert contour_levels(np.array([-1.0, 50.0])).min() <= 0  # no logarithm
    assert len(contour_levels(np.array([2.0, 2.0]))) == len(contour_levels(np.array([]))) == 0


@pytest.mark.parametrize("loss", [np.full((7, 7), 2.0), np.full((7, 7), np.nan)])
def test_nothing_to_draw_lines_of(tmp_path, loss):
    (axes,) = plot_surface(surface(loss), tmp_path / "surface.png").axes
    assert not [c for c in axes.collections if hasattr(c, "levels")]
    assert len(axes.lines) == 6


def test_losses_that_are_not_finite_leave_a_gap(tmp_path):
    loss = surface()["loss"].copy()
    loss[0, :3] = np.nan, np.inf, 1e30
    del (regression := surface(loss))["acc"]
    (axes,) = plot_surface(regression, tmp_path / "surface.png").axes
    assert np.isfinite(lines_of(axes).levels).all()
    assert "squared error / 2" in axes.get_title()
