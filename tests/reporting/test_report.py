"""``src/report.py`` as a user types it, and its figures."""

import re

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import refuses, type_command
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from run_folders import GCFED, curve, run_of, write_run

import gcfed
from gcfed.plots.style import GREY, looks
from gcfed.reporting import figures, write_report
from gcfed.reporting.frame import frame_of
from gcfed.utils.resolvers import CONFIGS

EVIL = "<script>alert(1)</script>"


def write_runs(root):
    for seed in (1, 2, 3):
        for gc, level in (("none", 0.4), ("gcfed", 0.6)):
            write_run(
                root / f"{gc}_{seed}",
                curve(level, 4, seed),
                f"data=digits gc={gc} rounds=4",
                seed=seed,
            )
    failure = f"OSError: {EVIL}\nTraceback"
    write_run(
        root / "failed", curve(0.4, 2), "data=digits gc=none rounds=4", failure=failure, seed=4
    )
    write_run(root / "debug" / "run", curve(0.1, 4), "data=digits gc=none rounds=4", seed=9)
    (root / "broken").mkdir()
    (root / "broken" / "config.yaml").write_text("a: [")
    (root / "broken" / "metrics.csv").touch()


def test_the_report_from_the_command_line(tmp_path):
    write_runs(tmp_path / "logs" / "a")
    words = (f"paths.log_dir={tmp_path}/logs", "measures=[best:test/acc,total:time/round_s]")
    printed = type_command(tmp_path, "report.py", *words)
    assert "7 runs: 6 finished, 1 failed" in printed  # debug runs do not count
    assert re.search("Not in this report: .*broken: its files cannot be read: ParserError", printed)
    out = tmp_path / "logs" / "report"  # the report lies next to the runs
    assert {*map(str, (path.name for path in (out / "tables").iterdir()))} == {
        "comparison_1.tex",
        "targets_1.tex",
        "runs.csv",
    }
    assert {path.name for path in out.glob("figures/*_1.*")} == {
        f"test_{column}_1.{suffix}" for column in ("acc", "loss") for suffix in ("png", "pdf")
    }
    table = pd.read_csv(out / "tables" / "runs.csv")
    assert table["reason"].tolist()[0] == f"after round 2 of 4: OSError: {EVIL}"
    assert len(table) == 7
    assert table["state"].tolist()[0] == "failed"
    assert table["total:time/round_s"].notna().all()
    assert [path for path in out.rglob("*.tex") if str(tmp_path) in path.read_text()] == []

    page = (out / "index.html").read_text()  # the page needs no other file, and its links are valid
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.index("GC-Fed leads, +19.9 points over FedAvg (") < page.index(
        "Test accuracy (%), higher is better"
    )
    assert page.index("<table") < page.index("<img")
    assert all(
        source.startswith("data:image/png;base64,") for source in re.findall('src="([^"]*)"', page)
    )
    for link in re.findall('href="([^"]*)"', page):
        assert (out / link).is_file(), link


@pytest.mark.parametrize(
    ("roots", "changed", "error", "message"),
    [
        (["nowhere"], {}, FileNotFoundError, "roots=.*nowhere: there is no such folder"),
        ([], {}, ValueError, "There is no run below .*logs"),
        (
            ["search"],
            {},
            ValueError,
            "There is no run below .*2 trials of a search, which are not compared",
        ),
        (["logs"], {"measures": ["most:x"]}, ValueError, "measures='most:x' is not understood"),
    ],
)
def test_an_error_names_the_argument_and_nothing_is_written(
    tmp_path, monkeypatch, roots, changed, error, message
):
    monkeypatch.setattr("gcfed.reporting.build.LOGS", tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    for folder in ("trial_0000", "trial_0001/seed_1"):  # the second trial has one run per seed
        write_run(tmp_path / "search" / folder, curve(0.9, 4), "data=digits rounds=4")
    (tmp_path / "search" / "trials.csv").touch()
    with pytest.raises(error, match=message):
        write_report(*(tmp_path / root for root in roots), out=tmp_path / "out", **changed)
    assert not (tmp_path / "out").exists()


def test_a_report_removes_only_tables_and_figures_that_an_earlier_one_wrote(tmp_path):
    for place in ("data=digits rounds=4", "data=synthetic rounds=4"):
        write_run(tmp_path / "logs" / place.replace(" ", "_"), curve(0.9, 4), place)
    out = tmp_path / "out"
    # a paper's folder, in which a user has figures with such names
    of_user = [out / name for name in ("tables/comparison_9.tex", "figures/test_acc_9.png")]
    for path in of_user:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    write_report(tmp_path / "logs", out=out)
    earlier = [*out.glob("tables/*_2.tex"), *out.glob("figures/*_2.p*")]
    assert {path.suffix for path in earlier} == {".tex", ".png", ".pdf"}
    write_report(tmp_path / "logs" / "data=digits_rounds=4", out=out, figures=False)
    assert (out / "tables" / "comparison_1.tex").is_file()
    assert [path for path in earlier if path.exists()] == []
    assert [path for path in of_user if not path.exists()] == []


def test_a_report_removes_no_file_outside_of_its_folders(tmp_path):
    write_run(tmp_path / "logs" / "run", curve(0.9, 4), "data=digits rounds=4")
    out = tmp_path / "out"
    out.mkdir()
    mine = tmp_path / "mine_1.tex"
    mine.touch()
    (out / "files.txt").write_text("tables/../../mine_1.tex\n../mine_1.tex\n")
    write_report(tmp_path / "logs", out=out, figures=False)
    assert mine.exists()


def test_a_root_below_debug_is_read_beside_others(tmp_path):
    for place in ("debug/run_1", "other/run_2", "other/debug/run_3"):
        write_run(tmp_path / "logs" / place, curve(0.9, 4), "data=digits rounds=4")
    roots = [tmp_path / "logs" / name for name in ("debug", "other")]
    write_report(*roots, out=tmp_path / "out", figures=False)
    table = pd.read_csv(tmp_path / "out" / "tables" / "runs.csv")
    assert sorted(re.findall(r"run_\d", " ".join(table["folder"]))) == ["run_1", "run_2"]


def test_a_measure_that_no_run_has_is_refused(tmp_path):
    write_run(tmp_path / "logs/one", curve(0.9, 4), "data=digits rounds=4")
    for measure, rest in (
        ("max:test/acurracy", r"test/acurracy: did you mean test/acc\?"),
        ("final:val/acc", r"val/acc\. There are "),
    ):
        with refuses(rf"^measures={measure}: no run here has {rest}"):
            write_report(tmp_path / "logs", out=tmp_path / "out", measures=measure)
        with refuses(rf"^measures={measure}: no run here has {rest}"):
            gcfed.runs(tmp_path / "logs", measures=measure)
    assert not (tmp_path / "out").exists()


def test_each_algorithm_has_one_colour_and_dash_pattern():
    files = [*CONFIGS.glob("algorithm/*.yaml"), *CONFIGS.glob("gc/*.yaml")]
    labels = [
        name
        for file in files
        for name in yaml.safe_load(file.read_text()).get("labels", {}).values()
    ]
    names = {*labels} - {"none", "FedZMG"} | {"FedZMG + Local GC"}  # its name in reports
    together = looks([*names, "GC-Fed, λ 0.5", "Mine"])
    assert len({str(together[name]) for name in names}) == len(names) > 25
    assert all(looks([name])[name] == together[name] for name in names)
    assert together["FedAvg"] == {"color": GREY, "linestyle": "-"}


@pytest.mark.parametrize(
    "names",
    [
        ["GC-Fed", "Local GC", "Global GC", "FedAvg, epochs 5", "FedAvg, epochs 2", "Mine"],
        ["FedAdam", "FedAvg", "GC-Fed", "FedProx", "SCAFFOLD"],  # two have one colour of their own
    ],
)
def test_the_methods_of_a_small_comparison_have_different_colours(names):
    found = looks(names)
    assert len({look["color"] for look in found.values()}) == len(names)
    assert found["GC-Fed"] == looks(["GC-Fed"])["GC-Fed"]


def test_a_method_of_a_notebook_goes_by_its_name():
    own = {"methods.mine._target_": "__main__.UpdateClipping"}
    (method,) = frame_of([run_of(**own)])["method"]
    assert method == "fedavg + UpdateClipping"


def test_curves_hold_the_data():
    values = np.array([[0.1, 0.5, 0.6], [0.2, 0.4, 0.8]])
    own = [run_of(seed=seed, values=one, rounds=3) for seed, one in enumerate(values, start=1)]
    lost = run_of("unfinished", seed=3, values=(0.9,))
    other = run_of(**GCFED, values=(0.3, np.nan, np.inf), rounds=3)
    frame = frame_of([*own, lost, other])
    frame["method"] = ["fedavg"] * 3 + ["gcfed"]
    (axes,) = figures.curves(frame, "test/acc", looks(frame["method"])).axes
    mean, dotted, single = axes.lines
    np.testing.assert_allclose(
        mean.get_xydata(), [*zip((1, 2, 3), 100 * values.mean(axis=0), strict=True)]
    )
    assert dotted.get_linestyle() == ":"
    assert [*dotted.get_ydata()] == [90]
    assert [*single.get_ydata()] == [30]
    bands = axes.collections[0].get_paths()[0].vertices
    assert bands[:, 1].max() == pytest.approx(100 * (0.7 + np.std([0.6, 0.8], ddof=1)))


def colours_of(figure):
    """How many pixels have each colour."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    colours, numbers = np.unique(pixels, axis=0, return_counts=True)
    return {
        to_hex(colour / 255): int(number) for colour, number in zip(colours, numbers, strict=True)
    }


@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
def test_every_method_shows_where_all_curves_coincide(rounds):
    values = tuple(np.linspace(0.2, 0.8, rounds))
    names = ["FedAvg", "FedProx", "GC-Fed", "SCAFFOLD"][: max(2, min(4, rounds))]
    runs = [run_of(values=values, rounds=rounds, **{"tags.algorithm": name}) for name in names]
    frame = frame_of(runs).assign(method=names, repeated=False)
    shades = looks(names)
    figure = figures.curves(frame, "test/acc", shades)
    (axes,) = figure.axes
    figure.legends.clear()
    if rounds == 1:  # all markers lie on one point, and the last one hides the others
        assert len({tuple(spot.get_offsets()[0]) for spot in axes.collections[1::2]}) == 1
        return
    shown = colours_of(figure)
    for name in names:
        assert shown.get(shades[name]["color"].lower(), 0) > 15, name


def test_a_figure_over_bytes_has_the_sums_of_both_ways():
    runs = []
    for name, size in (("FedAvg", 1e6), ("SCAFFOLD", 2e6)):
        run = run_of(values=(0.2, 0.4, 0.6), rounds=3, **{"tags.algorithm": name})
        run.metrics["comm/down_bytes"] = size
        run.metrics["comm/up_bytes"] = 0.5 * size
        runs.append(run)
    frame = frame_of(runs).assign(method=["FedAvg", "SCAFFOLD"], repeated=False)
    figure = figures.curves(frame, "test/acc", looks(frame["method"]), over="bytes")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "sent to and by clients (MB)"
    assert [line.get_xdata().tolist() for line in axes.lines] == [[1.5, 3, 4.5], [3, 6, 9]]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([20, 40, 60])


def test_the_report_draws_bytes_only_if_methods_differ_in_them(tmp_path):
    for more, names in ((1, ["acc_1", "loss_1"]), (2, ["acc_1", "acc_bytes_1", "loss_1"])):
        for name, size in (("a", 1), ("b", more)):
            rows = [row | {"comm/up_bytes": 5000 * size} for row in curve(0.5, 3)]
            method = {"m": {"_target_": name}}
            write_run(tmp_path / f"{more}" / name, rows, methods=method)
        write_report(tmp_path / f"{more}", out=tmp_path / "out" / f"{more}")
        drawn = sorted(path.stem for path in (tmp_path / "out" / f"{more}").glob("figures/*.png"))
        assert drawn == [f"test_{name}" for name in names]
