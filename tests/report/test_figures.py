"""What the report draws holds the numbers that it is of."""

import warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from run_folders import GCFED, PLACE, accuracies, run_of, write_run

from gcfed.report import drawing, figures
from gcfed.report.drawing import POINTS, agreement, curves, layer_map, seeds
from gcfed.report.figures import METHODS, draw
from gcfed.report.groups import by_federation, grouped
from gcfed.report.tables import Search
from gcfed.report.verdict import interval, main_measure, verdict
from gcfed.runs.folder import find_runs
from gcfed.runs.measures import Sample, describe, smooth
from gcfed.runs.reading import LabelCounts

ACCURACY = describe("last:test/acc")
COLORS = {"fedavg": "#0072B2", "gcfed": "#D55E00"}


@pytest.fixture
def axes():
    return Figure().subplots()


def with_column(name, column, *args, **kwargs):
    run = run_of(*args, values=(0.5,) * len(column), **kwargs)
    run.metrics[name] = column
    return run


def plots_of(*runs, **kwargs):
    groups = grouped(runs)
    found = {place: verdict(members) for place, members in by_federation(groups).items()}
    return {plot.name: plot for plot in figures.plots(groups, {p: v for p, v in found.items() if v}, **kwargs)}


def legend(axes):
    return axes.get_legend_handles_labels()[1]


def test_a_line_is_the_mean_over_seeds_and_its_band_is_their_deviation(axes):
    values = np.random.default_rng(0).random((2, 12))
    runs = [run_of(seed=seed, values=tuple(row)) for seed, row in enumerate(values)]
    curves(grouped(runs), "test/acc", COLORS, axes, smoothed=True)
    means = np.array([100 * smooth(run.curve("test/acc")) for run in runs])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), means.mean(0))
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx((means.mean(0) + means.std(0, ddof=1)).max())


@pytest.mark.parametrize("tests", [9, 10])
def test_a_curve_ends_where_its_table_says(axes, tests):
    """Both take ten rounds where all that finished have them; what diverged early does not change the curve."""
    values = tuple(np.random.default_rng(0).random(tests))
    runs = [run_of(values=values), run_of(**GCFED, values=values[::-1])]
    caption = plots_of(*runs)["test_acc_1"].panels[""](axes)
    groups = grouped(runs)
    ends = [describe(main_measure(groups)).of(group.runs).mean for group in groups]
    assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx(ends)
    assert ("mean of the tests in 10 rounds" in caption) == (tests == 10)
    runs += [run_of(state, values=(0.5,), seed=2) for state in ("diverged", "unfinished")]
    assert plots_of(*runs)["test_acc_1"].panels[""](axes).startswith(caption)


def test_long_curves_are_thinned_and_infinities_left_out(axes):
    curves(grouped([with_column("test/loss", [*np.linspace(2, 1, 799), np.inf])]), "test/loss", COLORS, axes)
    x = axes.lines[0].get_xdata()
    assert (len(x), x[0], x[-1]) == (POINTS, 1, 799)


def test_a_mean_is_of_rounds_that_all_seeds_have(axes):
    """A seed that was stopped early, or tested seldom, must not make the line jump from its level to the others'."""
    early = run_of(seed=1, values=(0.9,) * 97)
    curves(grouped([early, run_of(seed=2, values=(0.1,) * 200)]), "test/acc", COLORS, axes)
    assert axes.lines[0].get_xdata()[-1] == 97
    np.testing.assert_allclose(axes.lines[0].get_ydata(), 50)


def test_the_legend_has_no_method_that_did_not_measure_the_column(axes):
    curves(grouped([with_column("gap/l2", [0.1, 0.2]), run_of(**GCFED)]), "gap/l2", COLORS, axes)
    assert legend(axes) == ["fedavg"]


def test_what_has_not_finished_is_dotted_and_does_not_set_the_scale(axes):
    runs = [with_column("test/loss", [2.0, 1.0]), with_column("test/loss", [1.0, 1e9], "diverged", **GCFED)]
    assert "Dotted" in curves(grouped(runs), "test/loss", COLORS, axes)
    assert (axes.lines[-1].get_linestyle(), axes.lines[-1].get_color()) == (":", COLORS["gcfed"])
    assert axes.get_ylim()[1] < 3
    assert legend(axes) == ["fedavg", "gcfed"]


def test_panels_share_the_scale_of_all_that_finished():
    """What diverged in one panel must not cut off the curves of another."""
    high, low = with_column("test/loss", [9.0, 8.0]), with_column("test/loss", [2.0, 1.0])
    lost = with_column("test/loss", [1.0, 1e9], "diverged", **GCFED)
    panels = {"high": [high], "low": [low, lost]}
    drawn = {name: partial(curves, grouped(runs), "test/loss", COLORS) for name, runs in panels.items()}
    figure, _ = figures._drawn(drawn, 3.0)
    bottom, top = figure.axes[-1].get_ylim()
    assert 0 < bottom < 1
    assert 9 < top < 10


def test_a_sweep_is_drawn_over_its_number_with_one_line_a_method(axes):
    runs = [run_of(**GCFED, **{"gc.lam": lam, "seed": seed}, values=(lam + seed / 10,))
            for lam in (0.0, 0.5) for seed in (1, 2)]  # fmt: skip
    other = run_of(**GCFED, **{"gc.lam": 0.7, "client.epochs": 1})  # differs in two numbers: no sweep
    plot = plots_of(*runs, other, run_of())["gc.lam_1"]
    plot.panels[""](axes)
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(0, 15), (0.5, 65)])
    assert (axes.get_xlabel(), plot.title) == ("λ", "accuracy at the end against λ")
    assert plot.federation == f"{PLACE}, 30 rounds"


def test_two_numbers_that_change_together_are_no_sweep():
    runs = [run_of(**{"client.optimizer.lr": lr, "client.epochs": epochs}) for lr, epochs in ((0.1, 1), (0.01, 5))]
    assert not [name for name in plots_of(*runs) if name.startswith("client")]
    same = [run_of(**{"client.optimizer.lr": lr, "other.lr": lr}) for lr in (0.1, 0.01)]  # one number, twice
    assert "client.optimizer.lr_1" in plots_of(*same)


def test_a_sweep_over_a_federations_number_names_what_the_federations_share(axes):
    plot = plots_of(*(run_of(**{"partition.alpha": alpha}) for alpha in (0.1, 1.0, 10.0)))["partition.alpha_1"]
    assert plot.federation == "digits, mlp, 5 of 20 clients, 30 rounds"
    plot.panels[""](axes)
    assert axes.get_xscale() == "log"


def test_sweeps_with_other_settings_are_lines_of_their_own(axes):
    rates = {(alpha, lr): (alpha + lr) / 2 for alpha in (0.1, 1.0) for lr in (0.01, 0.1)}
    runs = [run_of(**{"partition.alpha": a, "client.optimizer.lr": lr}, values=(v,)) for (a, lr), v in rates.items()]
    # what most runs of a federation have is not in their names: η 0.01 at α 0.1, η 0.1 at α 1
    for alpha, lr in ((0.1, 0.01), (1.0, 0.1)):
        runs.append(run_of(**{"partition.alpha": alpha, "client.optimizer.lr": lr, "client.epochs": int(9 * alpha)}))
    plots_of(*runs)["partition.alpha_1"].panels[""](axes)
    lines = {tuple(np.round(line.get_ydata().astype(float), 6)) for line in axes.lines if len(line.get_ydata())}
    assert {(5.5, 50.5), (10, 55)} <= lines


def test_every_seed_their_mean_and_its_interval_are_a_line_a_method(axes):
    runs = [run_of(seed=seed, values=(value,)) for seed, value in enumerate((0.5, 0.6, 0.7))]
    groups = grouped([*runs, run_of(**GCFED, values=(0.9,))])
    seeds({group.method: (group, ACCURACY.of(group.runs)) for group in groups}, ACCURACY, COLORS, axes)
    bars, dots = axes.collections
    np.testing.assert_allclose(bars.get_segments(), [[(end, 0) for end in interval([50, 60, 70])]])
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(60, 0)])  # one seed has neither
    np.testing.assert_allclose(dots.get_offsets(), [(50, 0), (60, 0), (70, 0), (90, 1)])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fedavg", "gcfed"]
    assert axes.get_ylim() == (1.5, -0.5)  # the first one on top


@pytest.mark.parametrize(("values", "limits"), [((0.2, 0.9), (0, 100)), ((0.5, 0.51), (43.51, 57.49))])
def test_an_interval_does_not_stretch_the_axis_to_where_no_accuracy_is(axes, values, limits):
    (group,) = grouped([run_of(seed=seed, values=(value,)) for seed, value in enumerate(values)])
    seeds({"fedavg": (group, ACCURACY.of(group.runs))}, ACCURACY, COLORS, axes)
    assert axes.get_xlim() == pytest.approx(limits, abs=0.01)


def test_the_cost_of_a_target_says_who_did_not_reach_it(axes):
    groups = grouped([run_of(values=(0.2, 0.8)), run_of(**GCFED, values=(0.2,))])
    rounds = describe("rounds:test/acc>=0.8")
    seeds({group.method: (group, rounds.of(group.runs)) for group in groups}, rounds, COLORS, axes)
    np.testing.assert_allclose(axes.collections[-1].get_offsets(), [(2, 0)])
    assert axes.texts[-1].get_text() == "not reached by every seed"
    assert axes.get_xticks().tolist() == [1, 2, 3]  # whole rounds


def test_seeds_of_equal_results_are_dots_above_each_other(axes):
    """Tested every fifth round, five seeds reach a target in two different ones; twelve find room as well."""
    reached = {"fedavg": (5, 10, 5, 5, 10), "gcfed": (5,) * 12}
    groups = {gc: (group, Sample(dict(enumerate(map(float, reached[gc])))))
              for gc, group in zip(reached, grouped([run_of(), run_of(**GCFED)]), strict=True)}  # fmt: skip
    seeds(groups, describe("rounds:test/acc>=0.8"), COLORS, axes)
    dots = axes.collections[-1].get_offsets()
    assert len({*map(tuple, np.round(dots, 6))}) == 17
    assert dots[:, 0].tolist() == [5, 10, 5, 5, 10, *[5] * 12]
    rows = np.repeat([0, 1], [5, 12])
    assert (np.abs(dots[:, 1] - rows) < 0.5).all()  # on their method's line
    assert dots[:, 1].mean() == pytest.approx(rows.mean())


def test_every_federation_that_compares_has_its_figure_and_others_only_if_they_are_among_the_first():
    """Seven with two methods, of which one has two seeds; two methods that failed are no comparison."""
    runs = [run_of(**more, rounds=r, values=(0.5,)) for r in range(1, 8) for more in ({}, GCFED)]
    runs += [run_of(rounds=99), run_of("failed", **GCFED, rounds=99), run_of(rounds=5, values=(0.5,), seed=2)]
    names = {*plots_of(*runs)}
    assert {name for name in names if name.startswith("comparison")} == {f"comparison_{i}" for i in range(1, 8)}
    assert {name for name in names if name.startswith("test_acc")} == {f"test_acc_{i}" for i in range(1, 7)}
    assert {name for name in plots_of(*runs, detailed=9) if name.startswith("test_acc")} > {"test_acc_8"}
    assert "5 rounds" in plots_of(*runs)["comparison_1"].federation  # the one that compares the most


def test_methods_of_a_federation_have_colours_of_their_own(axes):
    """Of more methods than colours everywhere, two of one federation would have the same."""
    runs = [run_of(**{"client.epochs": epochs, "rounds": 1}) for epochs in range(1, 8)]
    runs += [run_of(**{"client.epochs": epochs}) for epochs in (1, 8)]
    plots_of(*runs)["test_acc_2"].panels[""](axes)
    drawn = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(drawn) == 2
    assert {style for _, style in drawn} == {"-"}


def test_layers_are_a_map(axes):
    run = with_column("cka/conv1", [0.8, 1.0])
    run.metrics["cka/fc"] = [0.2, 0.4]
    layer_map(grouped([run]), ["cka/conv1", "cka/fc"], axes)
    assert [(label.get_text(), label.get_rotation()) for label in axes.get_yticklabels()] == [("fedavg", 0)]
    np.testing.assert_allclose(axes.collections[0].get_array().ravel(), [0.9, 0.3])


def test_agreement_is_a_map_of_layers_and_rounds(axes):
    runs = [with_column("gc/rho/fc1", [0.2 * seed, 0.4], seed=seed) for seed in (1, 2)]
    for run in runs:
        run.metrics["gc/rho/fc2"] = [1.0, np.nan]
    assert {"rho_1_1"} <= set(plots_of(*runs))
    agreement(grouped(runs)[0], ["gc/rho/fc1", "gc/rho/fc2"], axes)
    np.testing.assert_allclose(axes.collections[0].get_array().filled(-1), [[0.3, 0.4], [1, -1]])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["fc1", "fc2"]


def test_methods_that_send_unequal_bytes_are_also_compared_by_bytes(axes):
    few, many = (run_of(values=(0.2, 0.4), **more) for more in ({}, GCFED))
    for run, sent in ((few, 1e9), (many, 3e9)):
        run.metrics["comm/up_bytes"] = sent
        run.metrics["comm/down_bytes"] = 1e9
    plots_of(few, many)["bytes_1"].panels[""](axes)
    assert [list(line.get_xdata()) for line in axes.lines[:2]] == [[2, 4], [4, 8]]
    many.metrics["comm/up_bytes"] = 1e9
    assert "bytes_1" not in plots_of(few, many)
    lost = run_of("failed", values=(), seed=0)  # before its first round
    assert "bytes_1" not in plots_of(lost, few, many)


def test_a_point_by_bytes_is_a_round_of_all_seeds(axes):
    runs = [run_of(values=(0.2, 0.4), seed=seed) for seed in (1, 2)]
    for run, sent in zip(runs, (1e9, 2e9), strict=True):
        run.metrics["comm/up_bytes"] = sent
    curves(grouped(runs), "test/acc", COLORS, axes, by_bytes=True)
    assert list(axes.lines[0].get_xdata()) == [1.5, 3.0]


def test_the_longest_updates_are_a_map_of_clients_and_layers(axes, tmp_path):
    run = run_of(folder=tmp_path)
    lines = ["1,7,conv,10,5", "1,7,fc,0,0", "1,8,conv,nan,nan", "1,8,fc,inf,inf", "1,9,conv,100,100", "1,9,fc,1,0"]
    (tmp_path / "updates.csv").write_text("\n".join(["round,client,tensor,norm,removed", *lines]))
    plots_of(run)["updates_1_1"].panels[""](axes)
    cells = axes.collections[0]
    np.testing.assert_allclose(cells.get_array().filled(-1), [[-1, -1], [2, 0], [1, -1]])
    assert cells.get_clim() == (0, 2)
    assert [text.get_text() for text in axes.get_yticklabels()] == [f"round 1, client {k}" for k in (8, 9, 7)]
    assert [text.get_text() for text in axes.texts] == ["100%", "0%", "25%"]


def kinds_of_gc(folder="/nowhere"):
    """Two algorithms with each of four kinds of GC."""
    gcs = {"none": 0.1, "Local GC": 0.2, "Global GC": 0.3, "GC-Fed": 0.4}
    return [
        run_of(values=(value + more,), folder=f"{folder}/{algorithm}-{gc}/trial_0000",
               **{"labels.algorithm": algorithm, "labels.gc": gc, "a.key": algorithm + gc})
        for algorithm, more in (("FedAvg", 0.0), ("FedSAM", 0.5)) for gc, value in gcs.items()
    ]  # fmt: skip


def test_more_methods_than_colours_are_a_panel_an_algorithm(axes):
    runs = kinds_of_gc()
    assert [*plots_of(*runs[:7])["test_acc_1"].panels] == [""]
    panels = plots_of(*runs)["test_acc_1"].panels
    assert [*panels] == ["FedAvg", "FedSAM"]
    panels["FedSAM"](axes)
    names = legend(axes)
    heights = [line.get_ydata()[0] for line in axes.lines if len(line.get_ydata())]
    assert dict(zip(names, heights, strict=True)) == pytest.approx(
        {"no GC": 60, "Local GC": 70, "Global GC": 80, "GC-Fed": 90}
    )
    other = run_of(**{"labels.algorithm": "FedAvg", "labels.gc": "none", "b.key": 1})  # FedAvg without GC, twice
    assert [*plots_of(*runs, other)["test_acc_1"].panels] == [""]


def test_searches_are_curves_of_the_best_value_so_far(axes, tmp_path):
    trials = pd.DataFrame({"number": [0, 1, 2, 3], "value": [0.2, 0.1, np.nan, 0.3]})
    runs = kinds_of_gc(tmp_path)
    for search, best in (
        (Search(trials, "mean:val/acc[10]", higher=True), [20, 20, 20, 30]),
        (Search(trials, "last:val/loss", higher=False), [0.2, 0.1, 0.1, 0.1]),
    ):
        trials = {run: run.folder.parent for run in runs}
        (plot,) = figures.of_searches(trials, dict.fromkeys(trials.values(), search))
        assert [*plot.panels] == ["FedAvg", "FedSAM"]
        plot.panels["FedAvg"](axes)
        np.testing.assert_allclose(axes.lines[-1].get_xydata().T, [[1, 2, 3, 4], best])
    figure, _ = figures._drawn(plot.panels, plot.height)
    assert [axes.get_title() for axes in figure.axes] == ["FedAvg", "FedSAM"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["no GC", "Local GC", "Global GC", "GC-Fed"]
    assert not [*figures.of_searches(trials, {})]


def test_families_and_partitions(tmp_path):
    run = tmp_path / "logs" / "a"
    write_run(
        run, accuracies(0.5, 0.6, **{"drift/client_norm": [1, 1], "test/rmse": [2, 1]}), "data=digits gc=none rounds=2"
    )
    LabelCounts(np.arange(3), np.eye(3, dtype=int), 3).save(run)
    failed = {}
    groups = grouped(find_runs([tmp_path / "logs"]))
    pictures = draw([*figures.plots(groups, {}), *figures.partitions(groups)], tmp_path / "out", ["pdf"], failed)
    assert failed == {}
    names = {"test_acc_1", "test_loss_1", "test_rmse_1", "drift_client_norm_1", "partition_1"}
    assert {picture.file.stem for picture in pictures} == names
    assert len(list((tmp_path / "out").glob("*.pdf"))) == 5


def test_long_names_and_a_run_under_way_cost_no_figure(axes, tmp_path):
    names = [f"{'a name of a method, ' * 5}{i}" for i in range(12)]
    runs = [run_of(values=(0.2, 0.8), targets=[0.5], **{"labels.algorithm": n, "a.key": n}) for n in names]
    begun = with_column("cka/conv1", [0.8, 1.0], state="unfinished")
    failed = {}
    pictures = draw(plots_of(begun, *runs).values(), tmp_path, [], failed)
    assert failed == {}
    assert {"comparison_1", "test_acc_1", "target_1"} <= {picture.file.stem for picture in pictures}
    for first, begun_is_there in ((0, False), (1, True)):  # of twelve methods those with results come first
        plots_of(begun, *runs[first:])["test_acc_1"].panels[""](axes)
        assert (len(legend(axes)), "fedavg" in legend(axes)) == (METHODS, begun_is_there)
        axes.clear()


def test_a_warning_costs_its_figure_only(tmp_path, monkeypatch, unrendered):
    monkeypatch.setattr(drawing, "curves", lambda *args, **look: warnings.warn("unreadable", UserWarning, stacklevel=1))
    runs = [run_of(values=(0.2, 0.8), targets=[0.5]), run_of(**GCFED, values=(0.6,), targets=[0.5])]
    failed = {}
    pictures = draw(plots_of(*runs).values(), tmp_path, [], failed)
    assert failed == {f"test accuracy (%), {PLACE}, 30 rounds": "UserWarning: unreadable"}
    names = ["comparison_1.png", "target_1.png"]
    assert [picture.file.name for picture in pictures] == sorted(path.name for path in tmp_path.iterdir()) == names
