"""What the report draws holds the numbers that it is of."""

import warnings

import numpy as np
import pytest
from matplotlib.figure import Figure
from sample_runs import add_run, curve
from test_groups import GCFED, run_of

from gcfed.data.label_counts import LabelCounts
from gcfed.report import figures
from gcfed.report.figures import POINTS, against, bars, curves, draw, layer_map
from gcfed.report.groups import grouped
from gcfed.runs.folder import find_runs
from gcfed.runs.measures import smooth

COLORS = {"fedavg": "#0072B2", "gcfed": "#D55E00"}


@pytest.fixture
def axes():
    return Figure().subplots()


def plots_of(*runs):
    return {plot.name: plot for plot in figures._plots(grouped(runs))}


def test_a_line_is_the_mean_over_seeds_and_its_band_their_deviation(axes):
    values = np.random.default_rng(0).random((2, 12))
    runs = [run_of(seed=seed, values=tuple(row)) for seed, row in enumerate(values)]
    curves(grouped(runs), "test/acc", COLORS, axes)
    means = np.array([100 * smooth(run.curve("test/acc")) for run in runs])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), means.mean(0))
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx((means.mean(0) + means.std(0, ddof=1)).max())
    assert axes.get_xlabel() == "communication round"


def test_long_curves_are_thinned_and_infinities_left_out(axes):
    run = run_of(values=tuple(np.linspace(0, 1, 800)))
    run.metrics["test/loss"] = [*np.linspace(2, 1, 799), np.inf]
    curves(grouped([run]), "test/loss", COLORS, axes)
    x = axes.lines[0].get_xdata()
    assert (len(x), x[0], x[-1]) == (POINTS, 1, 799)


def test_what_has_not_finished_is_dotted_and_does_not_set_the_scale(axes):
    lost = run_of("diverged", seed=2, values=(0.5, 90.0))
    lost.metrics["test/loss"] = [1.0, 1e9]
    run = run_of(values=(0.5, 0.6))
    run.metrics["test/loss"] = [2.0, 1.0]
    told = curves(grouped([run, lost]), "test/loss", COLORS, axes)
    assert [line.get_linestyle() for line in axes.lines[-1:]] == [":"]
    assert axes.get_ylim()[1] < 3
    assert "Dotted" in told
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fedavg"]


def test_a_relative_error_has_a_logarithmic_axis(axes):
    run = run_of(values=(0.5, 0.6))
    run.metrics["test/relative_error"] = [1.0, 0.5]
    curves(grouped([run]), "test/relative_error", COLORS, axes)
    assert axes.get_yscale() == "log"


def test_a_sweep_is_drawn_over_its_number_with_one_line_a_method():
    runs = [run_of(**GCFED, **{"gc.lam": lam, "seed": seed}, values=(lam + seed / 10,))
            for lam in (0.0, 0.5) for seed in (1, 2)]  # fmt: skip
    plots = plots_of(*runs, run_of())
    axes = Figure().subplots()
    plots["gc.lam_1"].draw(axes)
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(0, 15), (0.5, 65)])
    assert (axes.get_xlabel(), plots["gc.lam_1"].title) == ("λ", "accuracy, last 10 rounds against λ")
    assert plots["gc.lam_1"].federation == "digits, mlp, 5 of 20 clients, Dirichlet 0.1, 30 rounds"


def test_a_sweep_over_a_federations_number_names_what_the_federations_share():
    plots = plots_of(run_of(), run_of(**{"partition.alpha": 1.0}), run_of(**{"partition.alpha": 10.0}))
    assert plots["partition.alpha_1"].federation == "digits, mlp, 5 of 20 clients, 30 rounds"
    axes = Figure().subplots()
    plots["partition.alpha_1"].draw(axes)
    assert axes.get_xscale() == "log"
    assert against.__doc__


def test_settings_that_differ_in_two_numbers_are_no_sweep():
    runs = [run_of(), run_of(**{"client.epochs": 1, "client.optimizer.lr": 0.1}), run_of(**{"client.epochs": 2})]
    plots = plots_of(*runs)
    assert [name for name in plots if "client" in name] == ["client.epochs_1"]


def test_bars_to_a_target(axes):
    groups = grouped([run_of(values=(0.2, 0.8)), run_of(**GCFED, values=(0.2,))])
    bars(groups, "rounds:test/acc>=0.8", COLORS, axes)
    assert [patch.get_width() for patch in axes.patches if patch.get_width() > 0] == [2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fedavg", "gcfed"]
    assert "not reached" in axes.texts[-1].get_text()


def test_layers_are_a_map(axes):
    run = run_of(values=(0.2, 0.8))
    run.metrics["cka/conv1"], run.metrics["cka/fc"] = [0.8, 1.0], [0.2, 0.4]
    layer_map(grouped([run]), ["cka/conv1", "cka/fc"], axes)
    np.testing.assert_allclose(axes.collections[0].get_array().ravel(), [0.9, 0.3])


def test_families_partitions_and_copies(tmp_path):
    add_run(tmp_path / "logs" / "a", "data=digits gc=none rounds=4", curve(0.5, 4, **{"drift/client_norm": 1.0}))
    LabelCounts(np.arange(3), np.eye(3, dtype=int), 3).save(tmp_path / "logs" / "a")
    for number in (2, 10):
        (tmp_path / "logs" / "a" / f"surface_round_{number}.png").write_bytes(b"%d" % number)
    failed = {}
    pictures = draw(grouped(find_runs([tmp_path / "logs"])), tmp_path / "out", ["pdf"], failed)
    assert failed == {}
    names = {"test_acc_1", "test_loss_1", "drift_client_norm_1", "partition_1", "surface_1"}
    assert {picture.file.stem for picture in pictures} == names
    assert (tmp_path / "out" / "surface_1.png").read_bytes() == b"10"
    assert len(list((tmp_path / "out").glob("*.pdf"))) == 4


def test_an_error_or_a_warning_costs_its_figure_only(tmp_path, monkeypatch):
    def warn(*args, **kwargs):
        warnings.warn("this cannot be read", UserWarning, stacklevel=1)

    monkeypatch.setattr(figures, "bars", warn)
    runs = [run_of(values=(0.2, 0.8), targets=[0.5]), run_of(**GCFED, values=(0.6,), targets=[0.5])]
    failed = {}
    pictures = draw(grouped(runs), tmp_path, [], failed)
    ((title, error),) = failed.items()
    assert title.startswith("rounds to 50 %, digits")
    assert error == "UserWarning: this cannot be read"
    assert [picture.file.name for picture in pictures] == ["test_acc_1.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["test_acc_1.png"]
