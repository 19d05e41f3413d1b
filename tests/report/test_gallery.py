"""Which figures a set of runs has something for, and their files."""

import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from run_folders import rows_of, write_run

from gcfed.report import gallery
from gcfed.report.gallery import draw
from gcfed.report.groups import grouped
from gcfed.report.layers import plot_cka_by_layer
from gcfed.report.runs import read_run

METHODS = [{"tags.gc": gc, "seed": seed} for gc in ("none", "gcfed") for seed in (1, 2)]


def runs_of(folder, configs, **columns):
    rows = rows_of([0.2, 0.6, 0.95], **columns)
    return [write_run(folder / str(i), config=config, rows=rows) for i, config in enumerate(configs)]


def test_two_formats_of_each_figure(tmp_path):
    pictures = draw(grouped(runs_of(tmp_path / "runs", METHODS[:1])), tmp_path / "out")
    assert [picture.name for picture in pictures] == ["dynamics", "bytes_to_target", "measured_loss"]
    for picture in pictures:
        assert matplotlib.image.imread(picture.path_png).std() > 0.02, "an empty picture"
        assert picture.path_png.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        assert picture.caption.endswith(".")
        assert picture.title
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".pdf"}


def test_the_same_runs_give_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "FIRST", gallery.FIRST[:1])
    groups = grouped(runs_of(tmp_path / "runs", METHODS[:1]))
    for name in "ab":
        draw(groups, tmp_path / name)
    for suffix in ("png", "pdf"):
        first, second = ((tmp_path / name / f"dynamics.{suffix}").read_bytes() for name in "ab")
        assert first == second


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(
    ("configs", "columns", "names"),
    [
        ([{"gc.lam": lam, "tags.gc": "gcfed"} for lam in (0.0, 0.5)], {}, {"lambda"}),
        ([{"client.optimizer.lr": lr} for lr in (0.1, 0.2)], {}, {"sweeps"}),
        ([{"methods.ssf.ratio": r, "tags.algorithm": "ssf"} for r in (0.1, 0.2)], {}, {"subspace"}),
        (
            [{"participation.per_round": k} for k in (1, 2)], {"gap/l2": [1, 2, 3]},
            {"participation", "measured_gap", "sweeps"},
        ),
        ([{}], {"cka/fc1": [1, 1, 1], "cka/fc2": [1, 1, 0.5]}, {"cka_layers", "measured_cka"}),
        ([{}], {"angle/server": [80, 90, 95], "mine/x": [1, 2, 3]}, {"measured_angle", "measured_mine"}),
    ],
)  # fmt: skip
def test_figures_apply_where_runs_hold_something_for_them(configs, columns, names, tmp_path):
    usual = {"dynamics", "bytes_to_target", "measured_loss"}
    pictures = draw(grouped(runs_of(tmp_path / "runs", configs, **columns)), tmp_path / "out", formats=["png"])
    assert {picture.name for picture in pictures} - usual == names


@pytest.mark.usefixtures("unrendered")
def test_no_runs_no_figures(tmp_path):
    assert draw([], tmp_path / "out") == []
    started = write_run(tmp_path / "started", config={}, rows=[])
    failed = write_run(tmp_path / "failed", config={"seed": 2, "rounds": 3}, rows=[], failure="ValueError: no")
    (started.folder / "config.yaml").write_text("rounds: [")
    unreadable = read_run(started.folder)
    assert draw(grouped([started, failed, unreadable]), tmp_path / "out") == []


def test_what_runs_have_drawn_themselves_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "FIRST", ())
    monkeypatch.setattr(gallery, "MEASURED", {})
    runs = [
        write_run(tmp_path / "runs" / str(i), config=config, rows=[{"round": 9}]) for i, config in enumerate(METHODS)
    ]
    for run, names in zip(runs, (["leakage_round_2", "leakage_round_10"], ["surface_round_5"], [], []), strict=True):
        for name in names:
            (run.folder / f"{name}.png").write_bytes(name.encode())
    (runs[0].folder / "leakage_round_10.pdf").write_bytes(b"%PDF")
    (runs[0].folder / "leakage_round_last.png").write_bytes(b"no number")
    monkeypatch.setattr(gallery, "families_of", lambda groups: {})
    surface, leakage = draw(grouped(runs), tmp_path / "out")
    assert leakage.path_png.read_bytes() == b"leakage_round_10"
    assert leakage.path_png.with_suffix(".pdf").read_bytes() == b"%PDF"
    assert leakage.caption.endswith("FedAvg, seed 1, round 10.")
    assert surface.path_png.read_bytes() == b"surface_round_5"
    assert surface.caption.endswith("FedAvg, seed 2, round 5.")
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.usefixtures("unrendered")
def test_a_set_has_room_for_so_many_panels(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "MOST_PANELS", 2)
    runs = runs_of(tmp_path / "runs", METHODS[:1], **{"angle/server": [80, 90, 95]})
    pictures = draw(grouped(runs), tmp_path / "out")
    assert [picture.name for picture in pictures] == ["dynamics", "bytes_to_target"]
    assert pictures[-1].caption.endswith(" Not drawn for want of room: Angles of the updates, Losses.")


@pytest.mark.usefixtures("unrendered")
def test_similarity_by_layer(tmp_path):
    cka = {"cka/conv1": [1.0, 0.9, 0.8], "cka/fc": [0.8, None, 0.6]}
    runs = [
        *runs_of(tmp_path / "a", METHODS[:1], **cka),
        *runs_of(tmp_path / "b", METHODS[1:2], **{name: [0.5] * 3 for name in cka}),
    ]
    (axes,) = plot_cka_by_layer(grouped(runs), tmp_path / "a.png").figure.axes
    (container,) = axes.containers
    np.testing.assert_allclose(container.lines[0].get_ydata(), [(0.9 + 0.5) / 2, (0.7 + 0.5) / 2])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["conv1", "fc"]


def test_no_pyplot_and_no_torch():
    code = "import sys, gcfed.report.gallery; assert not {'matplotlib.pyplot', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
