"""Bytes against accuracy, counted by hand."""

import json

import numpy as np
import pytest
from run_folders import rows_of, write_run

from gcfed.report.costs import bytes_to, plot_bytes, plot_bytes_to_target, sent, unit_of
from gcfed.report.groups import grouped

pytestmark = pytest.mark.usefixtures("unrendered")


def run_of(folder, accuracies, *, up=4e6, down=6e6, **config):
    traffic = {"comm/up_bytes": [up] * len(accuracies), "comm/down_bytes": [down] * len(accuracies)}
    config = {"targets": [0.5], **{key.replace("__", "."): value for key, value in config.items()}}
    return write_run(folder, config=config, rows=rows_of(accuracies, **traffic))


def test_bytes_are_summed_in_both_directions(tmp_path):
    run = run_of(tmp_path / "a", [0.1, np.nan, 0.6, 0.4])
    assert sent(run).tolist() == [1e7, 2e7, 3e7, 4e7]
    assert bytes_to(run, 0.5) == 3e7
    assert bytes_to(run, 0.5) == json.loads((tmp_path / "a" / "summary.json").read_text())["bytes_to_target"]["0.5"]
    assert bytes_to(run, 0.7) is None


@pytest.mark.parametrize(("most", "unit"), [(5, "bytes"), (999, "bytes"), (1e3, "kB"), (2.5e9, "GB"), (1e15, "TB")])
def test_units(most, unit):
    assert unit_of(most)[0] == unit


def test_accuracy_against_what_was_sent(tmp_path):
    """SCAFFOLD sends twice as much; round 2 was not tested."""
    runs = [
        run_of(tmp_path / "a", [0.1, np.nan, 0.6]),
        run_of(tmp_path / "b", [0.2, np.nan, 0.7], up=8e6, down=12e6, tags__algorithm="scaffold"),
    ]
    (axes,) = plot_bytes(grouped(runs), tmp_path / "a.png").figure.axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[10, 30], [20, 60]]
    np.testing.assert_allclose([line.get_ydata() for line in axes.lines], [[10, 60], [20, 70]])
    assert axes.get_xlabel() == "sent in both directions (MB)"


def test_where_all_send_the_same_the_rounds_say_it(tmp_path):
    runs = [run_of(tmp_path / gc, [0.1, 0.6], tags__gc=gc) for gc in ("none", "gcfed")]
    assert plot_bytes(grouped(runs), tmp_path / "a.png") is None


def test_bars_to_a_target(tmp_path):
    runs = [
        run_of(tmp_path / "a1", [0.1, 0.6, 0.7], seed=1),
        run_of(tmp_path / "a2", [0.1, 0.2, 0.6], seed=2),
        run_of(tmp_path / "b1", [0.55, 0.6, 0.8], seed=1, tags__gc="gcfed"),
        run_of(tmp_path / "b2", [0.1, 0.2, 0.45], seed=2, tags__gc="gcfed"),
        run_of(tmp_path / "c", [0.1, 0.2, 0.3], tags__gc="local"),
    ]
    drawn = plot_bytes_to_target(grouped(runs), tmp_path / "a.png")
    (axes,) = drawn.figure.axes
    assert [patch.get_width() for patch in axes.patches] == [25, 10]
    assert [patch.get_alpha() for patch in axes.patches] == [1, 0.45]
    assert [text.get_text() for text in axes.texts] == ["25 MB", "10 MB (1 of 2 seeds)", "not reached"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FedAvg", "GC-Fed", "Local GC"]
    assert axes.get_xlabel() == "sent until 50 % (MB)"
    (segment,) = axes.containers[1].lines[2][0].get_segments()
    np.testing.assert_allclose(segment[:, 0], 25 + np.array([-1, 1]) * np.std([20, 30], ddof=1))


def test_nothing_to_draw(tmp_path):
    silent = grouped([run_of(tmp_path / "a", [0.1, 0.2], up=0, down=0)])
    assert plot_bytes(silent, tmp_path / "a.png") is None
    assert plot_bytes_to_target(silent, tmp_path / "a.png") is None
    alone = grouped([run_of(tmp_path / "b", [0.1, 0.2])])
    assert plot_bytes_to_target(alone, tmp_path / "a.png") is None  # no target reached, and nobody to compare with
