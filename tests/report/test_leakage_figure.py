import matplotlib.image
import numpy as np
import pytest

from gcfed.report.leakage import plot_recovered


@pytest.mark.parametrize(("batch", "channels"), [(1, 1), (4, 3)])
def test_originals_lie_above_what_was_recovered(batch, channels, tmp_path):
    original, recovered = np.random.default_rng(0).random((2, batch, channels, 8, 8))
    above, below = ([f"{name} {i}" for i in range(batch)] for name in ("class", "MSE"))
    figure = plot_recovered(original, recovered, above, below, tmp_path / "new" / "leakage.png")
    assert [ax.get_title() for ax in figure.axes] == above + below
    for ax, image in zip(figure.axes, [*original, *recovered], strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array().reshape(8, 8, channels), image.transpose(1, 2, 0))
        assert ax.images[0].get_clim() == (0, 1)
    height, width, _ = matplotlib.image.imread(tmp_path / "new" / "leakage.png").shape
    assert 300 < height < 1500
    assert width < 2000
