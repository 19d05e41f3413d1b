"""Comparisons in parallel processes, own config files, the table of runs, and wrong arguments."""

import inspect
import re

import numpy as np
import pandas as pd
import pytest
from conftest import refuses
from hydra._internal.config_repository import ConfigRepository
from run_folders import write_run
from test_api import SMALL, compared

import gcfed
from gcfed import jobs
from gcfed.api import Comparison
from gcfed.folders.reading import read_metrics
from gcfed.jobs import in_words


@pytest.mark.slow
def test_parallel_processes_give_the_same_numbers_and_say_how_long_it_takes(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # a process gets one of them
    methods = {0.01: [*SMALL, "client.optimizer.lr=0.01"], 0.1: SMALL}
    parallel = gcfed.compare(methods, seeds=[2], folder=tmp_path / "parallel", jobs=2)
    printed = capsys.readouterr().out
    assert re.match(r"run 1 of 2: .*, seed 2; about \d+ (s|min) left\n", printed)
    assert printed.count("\n") == 2
    assert not printed.strip().endswith("left")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    serial = gcfed.compare(methods, seeds=[2], folder=tmp_path / "serial", quiet=True)
    assert capsys.readouterr().out == ""
    counted = [column for column in serial.frame if not column.startswith("time/")]
    pd.testing.assert_frame_equal(parallel.frame[counted], serial.frame[counted])
    assert serial.folders[0.01, 2].name == "0.01_seed2"
    assert [*serial.table(baseline=0.1).index] == [0.01, 0.1]
    assert len(serial.figure().axes[0].lines) == 2


#: What processes run instead of training, because torch takes seconds to import.
PRETENDS = """
import pickle, sys, time
cfg, quiet = pickle.load(sys.stdin.buffer)
if cfg.seed == 3:
    raise RuntimeError("my own mistake")
time.sleep(cfg.rounds / 5)
"""


@pytest.fixture
def pretended(monkeypatch):
    """The jobs of processes that pretend to train, and how many ran when each started."""
    started = []
    at_a_time = []
    start = jobs._start

    def noted(*arguments):
        started.append(start(*arguments))
        at_a_time.append(sum(job.process.poll() is None for job in started))
        return started[-1]

    monkeypatch.setattr(jobs, "TRAIN_FROM_STDIN", PRETENDS)
    monkeypatch.setattr(jobs, "_start", noted)
    return started, at_a_time


def test_a_process_starts_when_another_has_ended(pretended, capsys):
    _, at_a_time = pretended
    cfg = gcfed.configure("rounds=1")
    jobs.train_all(dict.fromkeys("abcde", cfg), jobs=2, quiet=False)
    assert max(at_a_time) == 2
    assert re.findall(r"run (\d) of 5", capsys.readouterr().out) == [*"12345"]


def test_a_process_that_fails_names_its_run_and_reason_and_ends_the_others(pretended, tmp_path):
    started, _ = pretended
    with pytest.raises(RuntimeError, match=r"The run bad, seed 3 has failed: .*my own mistake"):
        gcfed.compare({"bad": "rounds=900"}, seeds=[2, 3], folder=tmp_path, jobs=2)
    assert len(started) == 2
    assert all(job.process.poll() is not None for job in started)


def test_a_class_of_a_notebook_is_refused_in_other_processes(tmp_path):
    own = [*SMALL, "+methods.mine._target_=__main__.Mine"]
    with refuses(r"methods.mine._target_=__main__.Mine .* or use jobs=1"):
        gcfed.compare({"mine": own}, folder=tmp_path, jobs=2)


@pytest.mark.parametrize(
    ("seconds", "words"), [(8.4, "8 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_the_time_left_is_in_words(seconds, words):
    assert in_words(seconds) == words


def test_a_difference_to_a_baseline_is_paired_by_seed(tmp_path):
    columns = {"x": {1: 0.5, 2: 0.9}, "y": {1: 0.4, 2: 0.7}}
    folders = {}
    frames = {}
    for method, by_seed in columns.items():
        for seed, acc in by_seed.items():
            folder = tmp_path / f"{method}{seed}"
            folders[method, seed] = folder
            run = write_run(folder, [{"test/acc": acc}], summary={"rounds": 1}, seed=seed)
            frames[method, seed] = run.metrics
    frame = pd.concat(frames, names=["method", "seed", "round"])
    table = Comparison(frame, folders).table(baseline="y")
    gap = np.array([10.0, 20.0])
    half = 12.7062 * gap.std(ddof=1) / np.sqrt(2)
    row = table.loc["x", ["difference", "from", "to"]]
    assert row.tolist() == pytest.approx([15, 15 - half, 15 + half], abs=0.005)
    assert table.loc["y", "difference"] == 0
    assert "pairs" not in table
    assert "difference" not in Comparison(frame, folders).table()


def test_a_table_counts_the_pairs_if_a_seed_has_no_difference(tmp_path):
    found = compared(tmp_path, x=("test/acc", {}), y=("test/acc", {}))
    del found.folders["y", 2]
    found.frame = found.frame.drop(("y", 2))
    table = found.table("test/acc", baseline="y")
    assert table["seeds"].to_dict() == {"x": 2, "y": 1}
    assert table["pairs"].to_dict() == {"x": 1, "y": 1}


def test_a_table_with_differences_fits_a_terminal(tmp_path, monkeypatch):
    """pandas hides columns in the middle of a table that is wider than the terminal."""
    for key, size in (("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(key, size)
    found = compared(tmp_path, **{"GC-Fed": ("test/acc", {}), "FedAvg": ("test/acc", {})})
    table = found.table(baseline="FedAvg")
    columns = ["mean", "low", "high", "difference", "from", "to", "seeds"]
    assert [*table] == columns
    with pd.option_context("display.max_columns", 0, "display.width", 80):
        heading = repr(table).splitlines()[0]
    assert heading.split() == ["final:test/acc", "(%)", *columns]
    assert max(map(len, repr(table).splitlines())) <= 80


def test_a_table_has_the_unit_and_digits_of_the_report(tmp_path):
    found = compared(tmp_path, A=("test/acc", {"comm/up_bytes": 2_123_456, "test/loss": 0.0123456}))
    assert found.table("comm/up_bytes").columns.name == "final:comm/up_bytes (MB)"
    assert found.table("comm/up_bytes").loc["A", "mean"] == 3.185  # of 2.123456 and 4.246912
    assert found.table("test/loss", rounds=2).columns.name == "mean:test/loss[2]"
    assert found.table("test/loss").loc["A", "mean"] == 0.01852
    found = compared(tmp_path / "ten", A=("test/acc", {"test/loss": 6.12345}))
    assert found.table("test/loss").loc["A", "mean"] == 9.185  # one run is above ten


def test_an_unknown_baseline_one_that_is_left_out_and_no_round_are_refused(tmp_path):
    own = "personal/local_acc"
    found = compared(tmp_path, A=("test/acc", {}), B=("test/acc", {}), FedRep=(own, {own: 0.4}))
    with refuses(r"baseline=FedAvg: there are A, B\."):
        found.table(baseline="FedAvg")
    with refuses("baseline=FedRep: FedRep is judged by personal/local_acc"):
        found.table(baseline="FedRep")
    with refuses("rounds=0 must be at least 1"):
        found.table(rounds=0)


def test_runs_are_a_frame_with_settings_and_measures(tmp_path):
    for seed, lr in ((1, 0.1), (2, 0.1), (1, 0.5)):
        rows = [{"test/acc": 0.2 * seed}, {"test/acc": 0.3 * seed, "comm/up_bytes": 7}]
        more = {"client": {"optimizer": {"lr": lr}}}
        write_run(tmp_path / f"{seed}_{lr}", rows, summary={"rounds": 2}, seed=seed, **more)
    frame = gcfed.runs(tmp_path)
    assert frame["client.optimizer.lr"].tolist() == [0.1, 0.5, 0.1]  # numbers, by folder
    assert frame["final:test/acc"].tolist() == pytest.approx([0.3, 0.3, 0.6])
    assert frame["total:comm/up_bytes"].tolist() == [5007, 5007, 5007]
    assert frame["final:test/loss"].isna().all()
    assert frame["folder"].tolist() == [str(tmp_path / n) for n in ("1_0.1", "1_0.5", "2_0.1")]
    assert gcfed.runs(tmp_path, measures="best:test/acc")["best:test/acc"][2] == 0.6
    with pytest.raises(FileNotFoundError, match="no such folder"):
        gcfed.runs(tmp_path / "none")
    with refuses("measures='worst:x' is not understood"):
        gcfed.runs(tmp_path, measures=["worst:x"])


MINE = """
# @package _global_
defaults: [fedavg, _self_]
tags:
  algorithm: mine
rounds: {}
"""


@pytest.mark.parametrize("by", ["config_dir", "hydra.searchpath"])
def test_own_files_are_found_and_read_again(tmp_path, monkeypatch, by):
    load = inspect.getclosurevars(ConfigRepository.load_config).nonlocals["load"]
    monkeypatch.setattr(ConfigRepository, "load_config", load)  # the tests' own reads a file once
    folder = tmp_path / "my conf, (1)"
    file = folder / "algorithm/mine.yaml"
    file.parent.mkdir(parents=True)
    for rounds in (7, 8):  # a user edits the file between two calls
        file.write_text(MINE.format(rounds))
        if by == "config_dir":
            cfg = gcfed.configure("algorithm=mine", "seed=3", config_dir=folder)
        else:
            words = [f"hydra.searchpath=['file://{folder}']", "algorithm=mine", "seed=3"]
            cfg = gcfed.configure(words)
        assert cfg.rounds == rounds
        assert cfg.seed == 3
        assert cfg.tags.algorithm == "mine"
        assert "searchpath" not in cfg.paths.output_dir.partition("hydra")[0]
    with refuses("algorithm=mine: there is no such option"):
        gcfed.configure("algorithm=mine")


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: gcfed.configure("rounds=2 seed=3"),
            ValueError,
            r"rounds=2 seed=3: an argument holds one override: write configure\('rounds=2',",
        ),
        (
            lambda: gcfed.configure({"rounds": 3}),
            TypeError,
            r"overrides are texts, not a dict: write configure\('rounds=3'\)\.",
        ),
        (lambda: gcfed.configure([3]), TypeError, "3 is no override"),
        (lambda: gcfed.configure(3), TypeError, "3 is no override"),
        (
            lambda: gcfed.train(["rounds=2"]),
            TypeError,
            r"train: \['rounds=2'\] is no config: write train\(gcfed.configure\(…\)\)",
        ),
        (lambda: gcfed.compare({"a": 3}), TypeError, "compare: 'a' is 3, which is no config"),
        (lambda: gcfed.compare({"a": {"rounds": 3}}), TypeError, "which is no config"),
        (
            lambda: gcfed.compare({"a": "gc=none"}, seeds=3),
            TypeError,
            "seeds=3 is no list of seeds",
        ),
        (lambda: gcfed.compare({"a": "gc=none"}, seeds="12"), TypeError, "write seeds="),
        (lambda: gcfed.compare({(1, 2): "seed=1"}), TypeError, "must be a text or a number"),
        (lambda: gcfed.compare(["a"]), TypeError, "compare takes a dict"),
        (lambda: gcfed.compare({"a": SMALL}, jobs=0), ValueError, "jobs=0 must be"),
        (
            lambda: gcfed.configure(config_dir="nowhere"),
            FileNotFoundError,
            "config_dir=nowhere: there is no such folder",
        ),
    ],
)
def test_a_wrong_argument_ends_in_one_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["name='a b=c'", "labels.model=my net", "name=a b"])
def test_a_value_with_spaces_is_one_override(word):
    assert gcfed.configure(word)


def test_a_folder_with_hydras_signs_is_one_override(tmp_path, monkeypatch):
    (tmp_path / "fruit (1), a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    cfg = gcfed.configure("data=image_folder", "data.root=fruit (1), a=b")
    assert cfg.data.root == "fruit (1), a=b"


def test_the_table_of_runs_is_a_package_that_can_be_called():
    assert gcfed.folders.reading.read_metrics is read_metrics
