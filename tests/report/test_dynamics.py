"""Figures over the rounds, read back from their lines."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from run_folders import rows_of, write_run

from gcfed.metrics.convergence import smooth
from gcfed.report.dynamics import FAMILIES, families_of, plot_dynamics, plot_errors, plot_measured
from gcfed.report.groups import grouped
from gcfed.report.panels import MOST_SERIES, Panel, Selection, room
from gcfed.report.series import Quantity

pytestmark = pytest.mark.usefixtures("unrendered")


def lines(axes, style=None):
    """Those that are curves, by their colour."""
    found = [line for line in axes.lines if line.get_label().startswith("_child") and len(line.get_xdata()) > 1]
    return [line for line in found if line.get_xdata()[0] != 0 and (style is None or line.get_linestyle() == style)]


def labels(figure):
    legend = figure.legends[0] if figure.legends else figure.axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()]


@pytest.fixture
def two_methods(tmp_path):
    rng = np.random.default_rng(0)
    curves = {gc: rng.random((3, 50)) for gc in ("none", "gcfed")}
    runs = [
        write_run(tmp_path / f"{gc}{seed}", config={"tags.gc": gc, "seed": seed}, rows=rows_of(curve))
        for gc, its in curves.items()
        for seed, curve in enumerate(its)
    ]
    return curves, grouped(runs)


def test_means_with_their_deviation(two_methods, tmp_path):
    curves, groups = two_methods
    drawn = plot_dynamics(groups, tmp_path / "a.png")
    (axes,) = drawn.figure.axes
    for line, band, its in zip(lines(axes), axes.collections, curves.values(), strict=False):
        smoothed = 100 * np.array([smooth(curve, 10) for curve in its])
        np.testing.assert_allclose(line.get_ydata(), smoothed.mean(0))
        high = band.get_paths()[0].vertices[:, 1].max()
        assert high == pytest.approx((smoothed.mean(0) + smoothed.std(0, ddof=1)).max())
        assert to_hex(band.get_facecolor()) == to_hex(line.get_color())
    assert labels(drawn.figure) == ["FedAvg", "GC-Fed"]
    assert "mean over 3 seeds, each point the mean of the last 10 measurements" in drawn.caption
    assert "6 runs of 2 settings, all with digits, MLP, 5/20, α 0.1, 50 rounds." in drawn.caption
    assert "settings are drawn" not in drawn.caption
    assert (tmp_path / "a.png").exists()


def test_a_panel_a_federation_and_one_look_a_method(tmp_path):
    runs = [
        write_run(tmp_path / f"{alpha}{gc}", config={"partition.alpha": alpha, "tags.gc": gc}, rows=rows_of([0.1, 0.6]))
        for alpha in (0.05, 1.0)
        for gc in ("none", "local")
    ]
    figure = plot_dynamics(grouped(runs), tmp_path / "a.png").figure
    assert [ax.get_title() for ax in figure.axes] == ["α 0.05", "α 1"]
    left, right = ([line.get_color() for line in lines(ax)] for ax in figure.axes)
    assert left == right
    assert len(set(left)) == 2
    assert labels(figure) == ["FedAvg", "Local GC"]


def test_what_diverged_is_dashed_and_named(tmp_path):
    rows = rows_of([0.2, 0.3, 0.1])
    rows[2]["test/loss"] = float("inf")
    runs = [
        write_run(tmp_path / "1", config={"seed": 1}, rows=rows_of([0.1, 0.2, 0.3])),
        write_run(tmp_path / "2", config={"seed": 2}, rows=rows),
        write_run(tmp_path / "3", config={"rounds": 3, "tags.gc": "gcfed"}, rows=rows_of([0.4, 0.5]), failure="E"),
    ]
    drawn = plot_dynamics(grouped(runs), tmp_path / "a.png")
    (axes,) = drawn.figure.axes
    np.testing.assert_allclose([line.get_ydata() for line in lines(axes, "-")], [[10, 20, 30]])
    np.testing.assert_allclose([line.get_ydata() for line in lines(axes, "--")], [[20, 30], [40, 50]])
    assert labels(drawn.figure) == ["FedAvg (1 of 2 seeds diverged)", "GC-Fed (failed)"]
    assert "Dashed: single runs that diverged, failed" in drawn.caption


def test_the_target_and_where_it_is_reached(tmp_path):
    curves = {"none": [0.1, 0.3, 0.5, 0.6], "gcfed": [0.1, 0.55, 0.6, 0.7]}
    runs = [
        write_run(tmp_path / gc, config={"tags.gc": gc, "targets": [0.5, 0.9]}, rows=rows_of(its))
        for gc, its in curves.items()
    ]
    drawn = plot_dynamics(grouped(runs), tmp_path / "a.png")
    (axes,) = drawn.figure.axes
    assert [text.get_text() for text in axes.texts] == ["50 %"]
    downs = [path.vertices[0, 0] for lines in axes.collections for path in lines.get_paths()]
    assert downs == [3, 2]
    assert "an accuracy to reach" in drawn.caption


def test_the_best_of_many_settings_and_one_of_every_method(tmp_path):
    """20 FedAvgs of different rates, and a FedProx that is worse than all of them."""
    runs = [
        write_run(tmp_path / str(i), config={"client.optimizer.lr": 0.1 + i}, rows=rows_of([0.5 + i / 100] * 2))
        for i in range(20)
    ]
    runs.append(write_run(tmp_path / "worse", config={"tags.algorithm": "fedprox"}, rows=rows_of([0.1] * 2)))
    drawn = plot_dynamics(grouped(runs), tmp_path / "a.png")
    shown = [line.get_ydata()[-1] for line in lines(drawn.figure.axes[0])]
    best = [50 + i for i in range(20)][-(MOST_SERIES - 1) :]
    np.testing.assert_allclose(shown, [*best, 10])
    assert f"{MOST_SERIES} of 21 settings are drawn" in drawn.caption


def test_the_panels_with_most_settings(tmp_path):
    """All but α = 2, which has one setting, and those beyond the room that there is."""
    runs = [
        write_run(tmp_path / f"{n}{gc}", config={"partition.alpha": n, "tags.gc": gc}, rows=rows_of([0.1, 0.2]))
        for n in range(1, 12)
        for gc in ("none", "local")[: 1 if n == 2 else 2]
    ]
    figure = plot_dynamics(grouped(runs), tmp_path / "a.png").figure
    assert room(21) == 9
    assert [ax.get_title() for ax in figure.axes] == [f"α {n}" for n in (1, *range(3, 11))]
    assert room(101) < room(100)
    assert room(21, minor=True) < room(21)


def test_a_method_has_one_name_in_all_panels(tmp_path):
    """Though of one data set only one of its rates is drawn."""
    settings = [{"tags.data": data, "client.optimizer.lr": lr} for data in "ab" for lr in (0.1, 0.01)]
    one, other, third, _ = grouped(
        write_run(tmp_path / str(i), config=config, rows=rows_of([0.1])) for i, config in enumerate(settings)
    )
    chosen = Selection((Panel("", (one, other)), Panel("", (third,))), 4)
    assert chosen.names == {"FedAvg, η 0.1": "FedAvg, η 0.1", "FedAvg, η 0.01": "FedAvg, η 0.01"}
    assert Selection((Panel("", (third,)),), 4).names == {"FedAvg, η 0.1": "FedAvg"}


def test_long_curves_are_thinned(tmp_path):
    accuracies = np.linspace(0, 0.9, 1000)
    run = write_run(tmp_path / "a", config={}, rows=rows_of(accuracies))
    (axes,) = plot_dynamics(grouped([run]), tmp_path / "a.png", window=1).figure.axes
    (line,) = lines(axes)
    assert len(line.get_xdata()) == 400
    assert line.get_xdata()[[0, -1]].tolist() == [1, 1000]
    np.testing.assert_allclose(line.get_ydata()[[0, -1]], [0, 90])


def test_regressions_show_their_error(tmp_path):
    rows = [{"test/loss": 1.0, "test/relative_error": 10.0**-i} for i in range(4)]
    groups = grouped([write_run(tmp_path / "a", config={}, rows=rows)])
    assert plot_dynamics(groups, tmp_path / "a.png") is None
    (axes,) = plot_errors(groups, tmp_path / "b.png").figure.axes
    np.testing.assert_allclose(lines(axes)[0].get_ydata(), [1, 0.1, 0.01, 0.001])
    assert axes.get_yscale() == "log"


def test_families_of_columns(tmp_path):
    rows = rows_of([0.5], **{"drift/cosine": [0.9], "mine/first": [1.0], "mine/second": [2.0], "cka/fc1": [0.9]})
    found = families_of(grouped([write_run(tmp_path / "a", config={}, rows=rows)]))
    assert {name: [q.column for q in family] for name, family in found.items()} == {
        "loss": ["train/loss", "test/loss"],
        "drift": ["drift/cosine"],
        "mine": ["mine/first", "mine/second"],
    }


def test_a_row_of_columns_a_federation(tmp_path):
    angles = {"angle/server": [80.0, 95.0], "angle/above_90": [0.2, 0.4]}
    runs = [
        write_run(tmp_path / str(a), config={"partition.alpha": a}, rows=rows_of([0.1, 0.2], **angles)) for a in (1, 2)
    ]
    drawn = plot_measured(grouped(runs), tmp_path / "a.png", quantities=FAMILIES["angle"])
    axes = drawn.figure.axes
    assert [(ax.get_title(), ax.get_ylabel()) for ax in axes] == [
        ("α 1", "angle to the last step (°)"),
        ("α 1", "clients above 90° (%)"),
        ("α 2", "angle to the last step (°)"),
        ("α 2", "clients above 90° (%)"),
    ]
    np.testing.assert_allclose(lines(axes[3])[0].get_ydata(), [20, 40])
    assert plot_measured(grouped(runs), tmp_path / "b.png", quantities=[Quantity("gap/l2", "")]) is None


def test_one_scale(tmp_path):
    columns = {"cka/a": [0.9, 1.0], "cka/b": [0.2, 0.4]}
    groups = grouped([write_run(tmp_path / "a", config={}, rows=rows_of([0.1, 0.2], **columns))])
    quantities = [Quantity(name, name) for name in columns]
    limits = {
        same: [
            ax.get_ylim()
            for ax in plot_measured(groups, tmp_path / "a.png", quantities=quantities, one_scale=same).figure.axes
        ]
        for same in (True, False)
    }
    assert limits[True][0] == limits[True][1]
    assert limits[True][0][0] < 0.2 < 1 < limits[True][0][1]
    assert limits[False][0] != limits[False][1]


def test_a_loss_is_cross_entropy_only_where_there_are_classes(tmp_path):
    rows = [{"test/loss": 1.0, "test/relative_error": 0.5}]
    groups = grouped([write_run(tmp_path / "a", config={}, rows=rows)])
    axes = plot_measured(groups, tmp_path / "a.png", quantities=FAMILIES["loss"]).figure.axes
    assert [ax.get_ylabel() for ax in axes] == ["training loss (squared error / 2)", "test loss (squared error / 2)"]


def test_a_run_that_diverges_does_not_hide_the_others(tmp_path):
    rows = rows_of([0.1] * 3)
    for row, loss in zip(rows, (1e6, 1e9, float("inf")), strict=True):
        row["test/loss"] = loss
    runs = [
        write_run(tmp_path / "1", config={}, rows=rows_of([0.1, 0.2, 0.3])),
        write_run(tmp_path / "2", config={"tags.gc": "local"}, rows=rows),
    ]
    figure = plot_measured(grouped(runs), tmp_path / "a.png", quantities=FAMILIES["loss"][1:]).figure
    assert figure.axes[0].get_ylim()[1] < 3
