"""The plane through three models, and the square around what lies on it."""

import copy

import numpy as np
import pytest
import torch

from gcfed.metrics.surface import Plane, square


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_axes_are_orthonormal_and_corners_are_the_models(dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    models = [
        {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in (("w", (7, 9)), ("b", (7,)))}
        for _ in range(3)
    ]
    for i, model in enumerate(models):
        model["running"] = torch.full((2,), 100.0 * i, dtype=dtype)  # a buffer: along, but of no length
    given = copy.deepcopy(models)
    plane = Plane(models, ["w", "b"])
    across, up = plane.axes
    assert across.norm() == pytest.approx(1, abs=tolerance)
    assert up.norm() == pytest.approx(1, abs=tolerance)
    assert across @ up == pytest.approx(0, abs=tolerance)
    for (x, y, _), model in zip(plane.corners, given, strict=True):
        for name, t in plane.at(x, y).items():
            torch.testing.assert_close(t, model[name], rtol=10 * tolerance, atol=10 * tolerance)
        assert plane.project(model) == pytest.approx((x, y, 0), abs=10 * tolerance)
    assert (plane.corners[1, 1], plane.corners[2, 1] > 0, plane.is_flat) == (0, True, False)
    assert np.isnan(plane.project(given[0] | {"w": torch.full_like(given[0]["w"], torch.inf)})).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_models_on_a_line_span_no_plane(dtype):
    """Also where two of them are equal, or differ by noise."""
    g = torch.Generator().manual_seed(0)
    origin, step, other = torch.randn(3, 50, generator=g, dtype=dtype)
    assert Plane([{"w": origin + s * step} for s in (0.0, 1.0, 0.3)], ["w"]).is_flat
    for noise in (0.0, torch.finfo(dtype).eps / 100):
        twins = [origin, origin * (1 + noise), other]
        for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1)):
            assert Plane([{"w": twins[i].clone()} for i in order], ["w"]).is_flat


def test_a_running_variance_is_never_negative():
    """Combinations with negative parts, outside the triangle, could make it so; its mean may be negative."""
    models = [
        {"w": torch.eye(3)[i], "bn.running_var": torch.tensor([1.0 + i]), "bn.running_mean": torch.ones(1) * i}
        for i in range(3)
    ]
    beyond = Plane(models, ["w"]).at(-3.0, -3.0)
    assert beyond["bn.running_var"].item() == 0
    assert beyond["bn.running_mean"].item() < -1


def test_the_square_holds_all_points_that_are_known():
    points = np.array([(0.0, 0.0), (4.0, 0.0), (1.0, 2.0), (np.nan, np.nan)])
    x, y = square(points, 3, 0.25)
    assert x.tolist() == [-1, 2, 5]
    assert y.tolist() == [-2, 1, 4]
