"""Results against settings that vary, read back from points and error bars."""

import numpy as np
import pytest
from run_folders import rows_of, write_run

from gcfed.report.borderline import BOTH, LOCAL, plot_lambda
from gcfed.report.groups import grouped
from gcfed.report.style import look
from gcfed.report.subspace import plot_subspace
from gcfed.report.sweeps import plot_participation, plot_sweeps, sweeps_of, swept_keys

pytestmark = pytest.mark.usefixtures("unrendered")
RNG = np.random.default_rng(0)


def bars(axes):
    """(x, y, standard deviation) of each series with error bars."""
    found = []
    for container in axes.containers:
        x, y = container.lines[0].get_data()
        ends = np.array(container.lines[2][0].get_segments())
        found.append((list(x), np.asarray(y), (ends[:, 1, 1] - ends[:, 0, 1]) / 2))
    return found


def labels(figure):
    legend = figure.legends[0] if figure.legends else figure.axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()]


def runs_of(folder, configs, *, seeds=2):
    """A run of 12 rounds for each config and seed, and the accuracies of its last ten, in percent: [configs, seeds]."""
    curves = RNG.random((len(configs), seeds, 12))
    runs = [
        write_run(folder / f"{i}_{seed}", config=config | {"seed": seed}, rows=rows_of(curves[i, seed]))
        for i, config in enumerate(configs)
        for seed in range(seeds)
    ]
    return runs, 100 * curves[:, :, 2:].mean(2)


def test_each_hyperparameter_that_varies_alone(tmp_path):
    """Learning rates of two methods, the momentum of one; the last config differs in two keys from all others."""
    rates = [{"client.optimizer.lr": lr, "tags.gc": gc} for gc in ("none", "gcfed") for lr in (0.001, 0.01, 0.1)]
    others = [{"client.optimizer.momentum": 0.0}, {"client.optimizer.momentum": 0.5, "client.epochs": 1}]
    runs, results = runs_of(tmp_path, [*rates, *others])
    groups = grouped(runs)
    assert swept_keys(groups) == ["client.optimizer.lr", "client.optimizer.momentum"]
    assert [sweep.x for sweep in sweeps_of(groups, "client.optimizer.lr")] == [(0.001, 0.01, 0.1)] * 2
    drawn = plot_sweeps(groups, tmp_path / "a.png")
    rate, momentum = drawn.figure.axes
    assert (rate.get_xlabel(), rate.get_xscale()) == ("client learning rate η", "log")
    assert (momentum.get_xlabel(), momentum.get_xscale()) == ("client momentum", "linear")
    for (x, mean, std), its in zip(bars(rate), (results[:3], results[3:6]), strict=True):
        assert x == [0.001, 0.01, 0.1]
        np.testing.assert_allclose(mean, its.mean(1))
        np.testing.assert_allclose(std, its.std(1, ddof=1))
    ((x, mean, _),) = bars(momentum)
    assert x == [0.0, 0.9]
    np.testing.assert_allclose(mean, results[[6, 1]].mean(1))
    assert labels(drawn.figure) == ["FedAvg", "GC-Fed"]
    assert "14 runs of 7 settings" in drawn.caption


def test_zero_on_a_logarithmic_axis(tmp_path):
    runs, _ = runs_of(tmp_path, [{"client.optimizer.weight_decay": w} for w in (0.0, 1e-5, 1e-3)], seeds=1)
    (axes,) = plot_sweeps(grouped(runs), tmp_path / "a.png").figure.axes
    assert axes.get_xscale() == "symlog"
    assert [axes.xaxis.get_major_formatter()(x, 0) for x in axes.get_xticks()] == ["0", "1e-05", "0.001"]


def test_a_panel_a_federation(tmp_path):
    configs = [{"partition.alpha": a, "client.epochs": e} for a in (0.05, 1.0) for e in (1, 5)]
    runs, _ = runs_of(tmp_path, configs, seeds=1)
    titles = [(ax.get_title(), ax.get_xlabel()) for ax in plot_sweeps(grouped(runs), tmp_path / "a.png").figure.axes]
    assert titles == [("α 0.05", "local epochs"), ("α 1", "local epochs"), ("", "Dirichlet α")]


def test_unfinished_runs_are_no_points_and_diverged_ones_are_crossed_out(tmp_path):
    rows = rows_of([0.3, 0.1])
    rows[1]["test/loss"] = float("inf")
    runs = [
        write_run(tmp_path / "1", config={"client.epochs": 1}, rows=rows_of([0.3, 0.5])),
        write_run(tmp_path / "2", config={"client.epochs": 2}, rows=rows),
        write_run(tmp_path / "3", config={"client.epochs": 5, "rounds": 2}, rows=rows_of([0.3]), summary=False),
    ]
    drawn = plot_sweeps(grouped(runs), tmp_path / "a.png")
    (axes,) = drawn.figure.axes
    ((x, mean, _),) = bars(axes)
    assert x == [1, 2]
    np.testing.assert_allclose(mean, [40, 20])
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    np.testing.assert_allclose(cross.get_xydata(), [[2, 20]])
    assert "Crossed out" in drawn.caption


def test_lambda_with_and_without_global_gc(tmp_path):
    """λ = 0 and 1 of GC-Fed are Global and Local GC, unless they were run; of Local GC only, no GC and Local GC."""
    gcfed = {"tags.gc": "gcfed", "gc.mean": "out"}
    local = {"tags.gc": "local", "gc.mean": "out"}
    configs = [
        *(gcfed | {"gc.lam": lam} for lam in (0.25, 0.5, 1.0)),
        *(local | {"gc.lam": lam} for lam in (0.25, 0.75)),
        local,
        {"tags.gc": "global", "gc.mean": "out"},
        {"tags.gc": "none"},
        gcfed | {"gc.boundary": "fc2"},
    ]
    runs, results = runs_of(tmp_path, configs, seeds=3)
    drawn = plot_lambda(grouped(runs), tmp_path / "a.png")
    (axes,) = drawn.figure.axes
    (x, mean, std), (x_local, mean_local, _) = bars(axes)
    assert x == [0, 0.25, 0.5, 1]
    np.testing.assert_allclose(mean, results[[6, 0, 1, 2]].mean(1))
    np.testing.assert_allclose(std, results[[6, 0, 1, 2]].std(1, ddof=1))
    assert x_local == [0, 0.25, 0.75, 1]
    np.testing.assert_allclose(mean_local, results[[7, 3, 4, 5]].mean(1))
    assert labels(drawn.figure) == [BOTH, LOCAL]


def test_lambda_of_several_algorithms(tmp_path):
    configs = [
        {"tags.gc": "gcfed", "tags.algorithm": algorithm, "gc.lam": lam}
        for algorithm in ("fedavg", "fedprox")
        for lam in (0.2, 0.8)
    ]
    runs, _ = runs_of(tmp_path, configs, seeds=1)
    assert labels(plot_lambda(grouped(runs), tmp_path / "a.png").figure) == [f"FedAvg: {BOTH}", f"FedProx: {BOTH}"]


def test_methods_look_as_in_the_other_figures(tmp_path):
    """Of three methods the last is swept; alone in its figure it keeps its colour."""
    configs = [{"tags.gc": gc} for gc in ("none", "local")]
    configs += [{"tags.gc": "gcfed", "partition.alpha": alpha} for alpha in (0.1, 1.0)]
    runs, _ = runs_of(tmp_path, configs, seeds=1)
    (axes,) = plot_sweeps(grouped(runs), tmp_path / "a.png").figure.axes
    assert axes.containers[0].lines[0].get_color() == look(2).color


def test_one_lambda_is_no_curve(tmp_path):
    runs, _ = runs_of(tmp_path, [{"tags.gc": "gcfed", "gc.lam": 0.5}, {"tags.gc": "local"}], seeds=1)
    assert plot_lambda(grouped(runs), tmp_path / "a.png") is None
    assert plot_sweeps(grouped(runs), tmp_path / "a.png") is None
    assert plot_subspace(grouped(runs), tmp_path / "a.png") is None
    assert plot_participation(grouped(runs), tmp_path / "a.png") is None


def test_dimension_of_a_subspace(tmp_path):
    def run(name, error, **config):
        rows = [{"test/loss": 1.0, "test/relative_error": 1.0}, {"test/loss": 1.0, "test/relative_error": error}]
        return write_run(tmp_path / name, config={key.replace("__", "."): v for key, v in config.items()}, rows=rows)

    runs = [
        *(run(f"ssf{r}", 0.1 / r, tags__algorithm="ssf", methods__ssf__ratio=r) for r in (0.01, 0.1, 0.5)),
        *(run(f"sub{r}", 0.2 / r, tags__algorithm="fedsub", methods__fedsub__ratio=r) for r in (0.01, 0.1)),
        run("full", 0.03, tags__algorithm="scaffold"),
        run("other", 0.5, tags__algorithm="fedprox"),
    ]
    drawn = plot_subspace(grouped(runs), tmp_path / "a.png")
    (axes,) = drawn.figure.axes
    (x, mean, _), (x_sub, mean_sub, _) = bars(axes)
    assert (x, x_sub) == ([0.01, 0.1, 0.5], [0.01, 0.1])
    np.testing.assert_allclose(mean, [10, 1, 0.2])
    np.testing.assert_allclose(mean_sub, [20, 2])
    assert labels(drawn.figure) == ["SSF", "FedSub", "SCAFFOLD"]
    levels = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    assert levels == [0.03]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_gap_against_participation(tmp_path):
    runs = [
        write_run(
            tmp_path / str(k),
            config={"participation.per_round": k},
            rows=rows_of([0.1, 0.2], **{"gap/l2": [4 / k, 2 / k], "gap/cosine": [0.9, None]}),
        )
        for k in (1, 2, 4)
    ]
    l2, cosine = plot_participation(grouped(runs), tmp_path / "a.png").figure.axes
    ((x, mean, _),) = bars(l2)
    assert x == [1, 2, 4]
    np.testing.assert_allclose(mean, [3, 1.5, 0.75])
    np.testing.assert_allclose(bars(cosine)[0][1], [0.9, 0.9, 0.9])
