"""``import gcfed``: results agree with the folders of runs, and comparisons with single runs."""

import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from os.path import relpath
from pathlib import Path
from types import FunctionType

import numpy as np
import pandas as pd
import pytest
from conftest import contents, refuses
from run_folders import write_run
from safetensors.torch import load_file

import gcfed
from gcfed.folders.folder import CHECKPOINT, EXPORT, read_run
from gcfed.folders.measures import measure_of, value
from gcfed.folders.reading import read_metrics
from gcfed.reporting.verdict import scale_of
from gcfed.utils.resolvers import ROOT

SMALL = (
    "rounds=2",
    "participation.num_clients=6",
    "client.epochs=1",
    "data.limit_train=80",
    "data.limit_test=30",
    "model.hidden=[8]",
    "extras.figures=false",
    "~logger.tensorboard",
)


EARLY = """
import sys
import gcfed
assert not {"torch", "lightning", "pandas", "hydra", "omegaconf"} & {*sys.modules}
assert dir(gcfed) == ["compare", "configure", "report", "runs", "train"]
cfg = gcfed.configure(SMALL, "+callbacks.stop._target_=__main__.Stop", folder=sys.argv[1])
assert "torch" not in sys.modules
import torch
from gcfed.federated.parts import ServerPart
class Stop(ServerPart):
    def on_broadcast(self, download, round):
        if round.index == 1:
            late = {"pandas", "peft", "wandb", "mlflow", "gcfed.plots", "gcfed.reporting"}
            found = late & {*sys.modules}
            sys.exit(repr(found))
gcfed.train(cfg)
"""


@pytest.mark.slow
def test_large_packages_are_imported_only_when_they_are_needed(tmp_path):
    """``import gcfed`` imports none of them, and ``configure`` no torch.

    Others are imported when they are used.
    """
    command = [sys.executable, "-c", f"{SMALL=}{EARLY}", str(tmp_path)]
    assert subprocess.run(
        command, cwd=ROOT / "src", capture_output=True, text=True
    ).stderr.endswith("set()\n")


def test_a_package_that_draws_random_numbers_during_its_import_changes_no_state(monkeypatch):
    state = random.getstate()
    monkeypatch.setattr(
        gcfed, "import_module", lambda name: (random.random(), import_module(name))[1]
    )
    assert callable(gcfed.train)
    assert random.getstate() == state


def test_a_run_from_python_and_its_folder_agree(tmp_path):
    log_dir = f"paths.log_dir={tmp_path}"
    cfg = gcfed.configure([*SMALL, "name=mine"], log_dir, "gc=none")
    result = gcfed.train(cfg)
    assert result.folder.parent == tmp_path / "mine"
    assert "_rounds-2_" in result.folder.name
    assert (result.folder / "config.yaml").read_text().startswith("# made from Python\n")
    assert result.frame.index.tolist() == [1, 2]
    pd.testing.assert_frame_equal(result.frame, read_metrics(result.folder / "metrics.csv"))
    assert result.frame["test/acc"][2] == result.metrics["test/acc"]
    saved = load_file(result.folder / "global_model.safetensors")
    assert all((tensor == saved[name]).all() for name, tensor in result.model.state_dict().items())
    over = gcfed.train(gcfed.configure(*SMALL, "name=mine", log_dir, "gc=none", "ckpt_path=last"))
    assert over.metrics == result.metrics
    again = gcfed.configure(*SMALL, "name=mine", log_dir, "gc=none", "rounds=3", "ckpt_path=last")
    assert again.paths.output_dir == str(result.folder)
    assert gcfed.configure(*SMALL, "name=mine", log_dir).paths.output_dir != str(result.folder)


def numbers(result):
    return result.frame.loc[:, ["train/loss", "test/loss"]].to_numpy().tolist()


def test_each_call_of_train_gets_a_new_folder(tmp_path):
    """The calls are a loop over a setting, another seed, and the same config again."""
    cfg = gcfed.configure(SMALL, f"paths.log_dir={tmp_path}")
    results = {}
    for lr in (0.01, 0.02):
        cfg.client.optimizer.lr = lr
        results[lr] = gcfed.train(cfg)
        # result.frame exists already
        (results[lr].folder / "metrics.csv").rename(tmp_path / f"{lr}.csv")
    cfg.seed = 2
    results["seed"] = gcfed.train(cfg)
    results["again"] = gcfed.train(cfg)
    assert (
        len({result.folder for result in results.values()})
        == len([*tmp_path.glob("*/*/config.yaml")])
        == 4
    )
    for lr in (0.01, 0.02):
        assert f"lr: {lr}\n" in (results[lr].folder / "config.yaml").read_text()
        pd.testing.assert_frame_equal(results[lr].frame, read_metrics(tmp_path / f"{lr}.csv"))
    assert numbers(results["again"]) == numbers(results["seed"])
    assert len({str(numbers(result)) for result in results.values()}) == 3
    cfg.rounds = 3
    cfg.ckpt_path = "last"
    assert gcfed.train(cfg).folder in (results["seed"].folder, results["again"].folder)


def test_a_quiet_run_prints_nothing_and_results_have_a_short_repr(tmp_path, caplog, capfd):
    # no client sends finite numbers
    noisy = [*SMALL, f"paths.log_dir={tmp_path}", "server.lr=1e30"]
    cfg = gcfed.configure(noisy)
    cfg.callbacks.progress = {"_target_": "gcfed.callbacks.after_round.RoundProgressBar"}
    result = gcfed.train(cfg, quiet=True)
    comparison = gcfed.compare({"one": cfg}, seeds=[1, 2], folder=tmp_path / "compared", quiet=True)
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""
    acc = result.metrics["test/acc"]
    assert (
        repr(result)
        == f"RunResult(round=2, test/acc={acc:.4g}, test/loss=nan, folder={str(result.folder)!r})"
    )
    assert repr(comparison) == "Comparison(methods=['one'], seeds=[1, 2], rounds=2)"
    gcfed.train(cfg)
    printed = capfd.readouterr().out
    assert "Round 2/2" in printed
    assert "nonfinite clients" in printed
    assert "numbers that are not finite" in caplog.text


def test_threads_train_one_after_another_in_their_own_folders(tmp_path):
    """They share torch's generators, which initialise networks."""

    def one(seed):
        return gcfed.train(gcfed.configure(SMALL, f"seed={seed}", f"paths.log_dir={tmp_path}"))

    cfg = gcfed.configure(SMALL, f"paths.log_dir={tmp_path}")
    with ThreadPoolExecutor(3) as pool:
        together = [*pool.map(one, (1, 2)), *pool.map(gcfed.train, (cfg,))]
    assert len({result.folder for result in together}) == 3
    assert [numbers(result) for result in together] == [numbers(one(seed)) for seed in (1, 2, 1)]


def test_a_given_folder_holds_only_one_run(tmp_path):
    cfg = gcfed.configure(SMALL, folder=tmp_path / "mine")
    assert gcfed.configure(SMALL, f"paths.output_dir={tmp_path}/mine") == cfg
    gcfed.train(cfg)
    before = contents(tmp_path)
    with refuses(r"/mine holds this run already: continue it with ckpt_path=last, or name"):
        gcfed.train(cfg)
    cfg.seed = 2
    other = gcfed.train(gcfed.configure(SMALL, "seed=2", folder=tmp_path / "other"))
    cfg.ckpt_path = str(other.folder / "checkpoints/last.ckpt")  # the checkpoint of another run
    with refuses(r"/mine holds another run: seed is 1 there, 2 here\. Name another folder"):
        gcfed.train(cfg)
    assert {
        path: content for path, content in contents(tmp_path).items() if "other" not in str(path)
    } == before
    cfg.seed = 1
    cfg.rounds = 3
    cfg.ckpt_path = "last"
    assert gcfed.train(cfg).frame.index.tolist() == [1, 2, 3]


def test_a_run_without_a_folder_is_refused():
    """Not trained into a folder of the name None."""
    cfg = gcfed.configure(SMALL, "paths.output_dir=null")
    with refuses("^paths.output_dir=null must be a text"):
        gcfed.train(cfg)


def test_relative_paths_start_at_the_current_folder(tmp_path, monkeypatch):
    """This holds for paths of data, checkpoints, run folders and reports."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    y = np.arange(120) % 3
    np.savez("own.npz", x=np.random.default_rng(0).normal(y[:, None], 1.0, (120, 4)), y=y)
    small = [
        "data=arrays",
        "data.path=own.npz",
        "rounds=2",
        "partition=iid",
        "extras.figures=false",
        "logger=csv",
    ]
    python = gcfed.train(gcfed.configure(small, "paths.log_dir=python"))
    named = gcfed.train(
        gcfed.configure(
            small, "seed=2", "model.start=" + relpath(python.folder / EXPORT), folder="my"
        )
    )
    assert {path.name for path in here.iterdir()} == {"own.npz", "python", "my"}
    assert python.folder.is_relative_to(here / "python")
    assert named.folder == here / "my"
    last = f"ckpt_path={relpath(python.folder / CHECKPOINT)}"
    assert gcfed.train(gcfed.configure(small, "rounds=3", last)).folder == python.folder
    assert gcfed.report("python", "my", out="page", figures=False) == here / "page" / "index.html"
    assert (here / "page/tables/runs.csv").read_text().count("finished") == 2
    monkeypatch.chdir(tmp_path)  # the result has absolute paths
    assert read_metrics(named.folder / "metrics.csv").equals(named.frame)


@pytest.mark.slow
def test_a_comparison_equals_single_runs(tmp_path):
    fedavg = gcfed.configure(SMALL, "gc=none")
    ours = gcfed.configure(SMALL, "ckpt_path=last", folder=tmp_path)
    configs = {"GC, Fed": ours, "FedAvg": fedavg}
    comparison = gcfed.compare(configs, seeds=[3, 1], folder=tmp_path / "runs")
    alone = gcfed.train(
        gcfed.configure(SMALL, "gc=none", "seed=1", folder=tmp_path / "alone")
    ).frame
    assert comparison.frame.index.names == ["method", "seed", "round"]
    assert comparison.frame.loc["FedAvg", 1]["train/loss"].tolist() == alone["train/loss"].tolist()
    assert comparison.folders["GC, Fed", 3] == tmp_path / "runs" / "GC-Fed_seed3"
    acc = [comparison.frame.loc["GC, Fed", seed]["test/acc"] for seed in (3, 1)]
    assert [*comparison.table().index] == ["GC, Fed", "FedAvg"]
    last = [curve.iloc[-1] for curve in acc]
    half = 12.7062 * abs(last[0] - last[1]) / 2
    expected = [np.mean(last), np.mean(last) - half, np.mean(last) + half]
    both = comparison.table(rounds=2).loc["GC, Fed"]
    assert both["mean"] == pytest.approx(100 * np.mean([curve.mean() for curve in acc]), abs=0.005)
    assert comparison.table(rounds=2).columns.name == "mean:test/acc[2] (%)"
    row = comparison.table().loc["GC, Fed"]
    assert row[["mean", "low", "high"]].tolist() == pytest.approx(
        [100 * number for number in expected], abs=0.01
    )
    assert row["seeds"] == 2
    assert comparison.table().columns.name == "final:test/acc (%)"
    assert comparison.table("train/loss").columns.name == "final:train/loss"

    figure = comparison.figure()
    (axes,) = figure.axes
    assert figure.get_layout_engine() is not None  # the legend lies below the axes
    with refuses(r"column=test/ac: no run here has it: did you mean test/acc"):
        comparison.figure("test/ac")
    assert axes.get_ylabel() == "test accuracy (%)"
    assert [line.get_label() for line in axes.lines] == [*configs]
    drawn = axes.lines[0].get_ydata()  # of "GC, Fed"
    assert drawn.tolist() == ((100 * acc[0] + 100 * acc[1]) / 2).tolist()

    before = contents(tmp_path / "runs")
    with refuses(
        r"runs/FedAvg_seed1 holds this run already: continue it with ckpt_path=last",
    ):
        gcfed.compare(configs, seeds=[1, 2], folder=tmp_path / "runs")
    assert contents(tmp_path / "runs") == before  # refused before any run
    fedavg.ckpt_path = "last"
    again = gcfed.compare(configs, seeds=[3, 1], folder=tmp_path / "runs")
    # equal seconds: no run trained again
    pd.testing.assert_frame_equal(again.frame, comparison.frame)
    page = gcfed.report(tmp_path / "runs", out=tmp_path / "report", figures=False)
    assert page.read_text().count("seed3") >= 2
    assert isinstance(gcfed.report, FunctionType)  # also after its package was imported


@pytest.mark.parametrize(
    ("more", "seeds", "sentence"),
    [
        (["gc.lam=2"], [1], "gc.lam=2 must be "),
        (["algorithm=fedprox", "methods.proximal.mu=-1"], [1], "methods.proximal.mu=-1 must be "),
        (["task._target_=mytask_of_nobody.Task"], [1], "there is no module mytask_of_nobody"),
        (["metrics=drift", "metrics.drift.every=0"], [1], "metrics.drift.every=0 must be "),
        ([], [1, 1], "different seeds"),
        ([], [], "different seeds"),
        ([], [1.5], "seed=1.5 must be "),
        (
            ["ckpt_path=run/checkpoints/last.ckpt"],
            [1],
            "continues its own folders, by ckpt_path=last",
        ),
    ],
)
def test_an_invalid_comparison_is_refused(tmp_path, more, seeds, sentence):
    configs = {"one": gcfed.configure(SMALL), "two": gcfed.configure(SMALL, more)}
    with refuses(sentence):
        gcfed.compare(configs, seeds, tmp_path / "runs")
    assert [*tmp_path.rglob("metrics.csv")] == []


OWN = "personal/local_acc"


@pytest.mark.parametrize("rounds", [29, 30])
@pytest.mark.parametrize("named", ["test/acc", "test/rmse", "val/acc", "val/mse", None])
@pytest.mark.parametrize("result", ["test/acc", "test/rmse", "test/loss"])
def test_a_comparison_has_the_numbers_of_the_report(tmp_path, rounds, named, result):
    """By the same measure, whether the column is named or is that of the result."""
    column = named or result
    folders = {}
    frames = {}
    for seed in (1, 2, 3):
        values = [0.5 + 0.1 * seed / number for number in range(1, rounds + 1)]
        rows = [{column: number, result: number} for number in values]
        folder = tmp_path / f"a_{seed}"
        folders["a", seed] = folder
        frames["a", seed] = write_run(folder, rows, summary={"rounds": rounds}, seed=seed).metrics
    frame = pd.concat(frames, names=["method", "seed", "round"])
    comparison = gcfed.Comparison(frame, folders)
    table = comparison.table(named)
    runs = [read_run(folder) for folder in folders.values()]
    measure = measure_of(column, [run.rounds for run in runs])
    mean = np.mean([value(run, measure) for run in runs])
    scale = scale_of(measure, [mean])
    assert table["mean"]["a"] == pytest.approx(scale.factor * mean, abs=0.5001 * 0.1**scale.digits)
    assert table.columns.name.split()[0] == measure
    assert measure.startswith("last10:") == ("acc" in column and rounds == 30)


def compared(root, **methods):
    """A comparison of runs that were not trained: method → (declared result, columns)."""
    folders = {}
    frames = {}
    for method, (result, columns) in methods.items():
        for seed in (1, 2):
            folder = root / f"{method}_{seed}"
            folders[method, seed] = folder
            rows = [{"test/acc": 0.1 * seed} | {name: x * seed for name, x in columns.items()}]
            summary = {"rounds": 1, "result": result}
            frames[method, seed] = write_run(folder, rows, summary=summary, seed=seed).metrics
    frame = pd.concat(frames, names=["method", "seed", "round"])
    return gcfed.api.Comparison(frame, folders)


def test_a_comparison_is_by_the_result_that_methods_declare(tmp_path, caplog):
    found = compared(tmp_path, FedAvg=("test/acc", {OWN: 0.2}), FedRep=(OWN, {OWN: 0.4}))
    table = found.table()
    assert table["mean"].to_dict() == {"FedAvg": pytest.approx(30), "FedRep": pytest.approx(60)}
    assert table.columns.name == f"final:{OWN} (%)"
    assert found.table("test/acc")["mean"].tolist() == pytest.approx([15, 15])
    assert not caplog.text
    assert found.figure().axes[0].get_ylabel() == "accuracy of clients' own models (%)"


def test_a_comparison_counts_diverged_runs(tmp_path):
    lost = ("test/acc", {"test/loss": float("inf")})
    found = compared(tmp_path, FedAvg=("test/acc", {"test/loss": 1.0}), Lost=lost)
    assert found.table()["diverged"].to_dict() == {"FedAvg": 0, "Lost": 2}
    assert found.table("test/acc", baseline="FedAvg")["diverged"].tolist() == [0, 2]


def test_a_comparison_leaves_out_what_cannot_be_compared_and_says_why(tmp_path, caplog):
    found = compared(
        tmp_path, FedAvg=("test/acc", {}), Other=("test/acc", {}), FedRep=(OWN, {OWN: 0.4})
    )
    table = found.table()
    assert [*table.index] == ["FedAvg", "Other"]
    assert table.columns.name == "final:test/acc (%)"
    why = f"FedRep is judged by {OWN}, which FedAvg and Other did not measure"
    assert f"Not compared: {why}" in caplog.text


def test_a_diverged_run_does_not_vanish_from_a_mean():
    """Two seeds of one method have finite losses. The third counts, too."""
    last = {("a", 1): 1.0, ("a", 2): 1.2, ("a", 3): math.inf}
    last |= {("b", 1): 2.0, ("b", 2): 2.2, ("b", 3): 2.1}
    rows = [
        (*run, round_number, loss) for run, loss in last.items() for round_number in range(1, 41)
    ]
    names = ["method", "seed", "round"]
    frame = pd.DataFrame(rows, columns=[*names, "test/loss"]).set_index(names)
    comparison = gcfed.Comparison(frame, dict.fromkeys(last, Path()))
    for rounds in (10, 30):  # a mean of the last rounds, and the last test
        table = comparison.table("test/loss", rounds, baseline="b")
        assert table["mean"].tolist() == [math.inf, pytest.approx(2.1)]
        assert table["low"].isna().tolist() == [True, False]
        assert table["difference"]["a"] == math.inf
        assert "pairs" not in table  # inf − 2.1 is a difference, too
