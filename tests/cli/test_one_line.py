"""A wrong setting, file or combination ends a command with one line that names the key."""

import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import composer, options, refuses
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from PIL import Image

from gcfed import commands
from gcfed.data.base import FederatedDataset, Split
from gcfed.folders.place import remove_refused

SMALL = (
    "participation.num_clients=5",
    "client.epochs=1",
    "data.limit_train=60",
    "data.limit_test=20",
    "extras.figures=false",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "logger=csv",
    "rounds=1",
)
# Words → a part of the line: a key, or the model, task or data.
WRONG = {
    "help": "help",
    "--lr 0.1": "client.optimizer.lr=0.1",
    "-m seed=1 2": "seed=1,2",
    "dataset=cifar10": "data=cifar10",
    "data.label_noise=0.2": "data.label_noise=[0.4,0.5]",
    "gcc=local": "gc=local",
    "gc=gcfd": "gc=gcfed",
    "algorithm=null": "algorithm",
    "algorithm=fedavgg": "algorithm=fedavg",
    "client.epochs=0": "client.epochs=0",
    "client.epochs=many": "client.epochs=many",
    "client.batch_size=-1": "client.batch_size=-1",
    "client.optimizer.lr=-1": "client.optimizer",
    "client.optimizer.lr=fast": "client.optimizer",
    "client.optimizer.momentum=-1": "client.optimizer",
    "client.last_batch=some": "client.last_batch",
    "client.stack=0": "client.stack",
    "client.clip_norm=-1": "client.clip_norm",
    "client.optimizer._target_=torch.optim.SDG": "client.optimizer",
    "rounds=0": "rounds=0",
    "rounds=ten": "rounds=ten",
    "seed=-1": "seed=-1",
    "seed=1,2": "seed=1,2",
    "eval_every=0": "eval_every=0",
    "precision=16-mixed": "precision=16-mixed",
    "name=a/b": "name=a/b",
    "name=${nope}": "nope",
    "targets=[2]": "targets",
    "partition.alpha=0": "partition.alpha=0",
    "partition=shards partition.alpha=1": "partition.alpha",
    "partition=natural": "partition=natural",
    "participation.num_clients=null": "participation.num_clients",
    "participation.per_round=6": "participation.per_round",
    "participation.faults.dropout=2": "participation.faults.dropout",
    "model=mpl": "mlp",
    "model.hidden=[0]": "model.hidden",
    "model.hidden=wide": "model.hidden",
    "model=cnn model.num_classes=3": "model.num_classes",
    "model=own": "model",
    "model._target_=nowhere.Net": "model._target_=nowhere.Net",
    "model.start=/nowhere/last.ckpt": "model.start=/nowhere/last.ckpt",
    "model=gpt": "model",
    "data=own": "data",
    "data=csv": "data.path",
    "data=csv data.path=/nowhere.csv": "data.path=/nowhere.csv",
    "data=arrays data.path={folder}/text.npz": "data.path",
    "data=arrays data.path={folder}/x.npz partition=natural": "partition",
    "data=image_folder data.root=/nowhere": "data.root=/nowhere",
    "data.dataset._target_=nowhere.load": "data.dataset._target_",
    "data.validation=1": "data.validation",
    "data.limit_train=0": "data.limit_train",
    "data.transform.mean=[0.1,0.2]": "data.transform.mean",
    "task._target_=gcfed.tasks.SquaredError": "task",
    "metrics=personal": "data.client_test",
    "metrics=gap federation=wire metrics.gap.every=9": "federation=none",
    "callbacks=best callbacks.best.monitor=test/rmse": "monitor=test/rmse",
    "callbacks=early_stopping callbacks.early_stopping.monitor=val/acc": "data.validation",
    "attack=sign_flip attack.fraction=2": "attack.fraction",
    "aggregator=krum aggregator.hostile=5": "aggregator",
    "server.lr=-1": "server",
    "gc.lam=2": "gc.lam=2",
    "gc.boundary=fc9": "fc1, fc2, fc3",
    "+rond=3": "rounds",
    "+methods.mine.mu=1": "methods.mine._target_",
    "+method.mine._target_=mine.Mine": "methods",
    "+methods.mine._target_=mine_of_nobody.Mine": "methods.mine._target_",
    "ckpt_path=last": "ckpt_path=last",
    "ckpt_path=it's.ckpt": "ckpt_path=it's.ckpt",
    "ckpt_path={folder}/text.npz": "ckpt_path",
    "trainer.accelerator=tpu": "trainer.accelerator",
    "trainer.devices=none": "trainer.devices",
    "trainer.devices=0": "trainer.devices=0",
    "trainer.devices=abc": "trainer.devices=abc",
    "paths=null": "paths",
    "hparams_search=digits_optuna": "-m",
    "hydra.run.dir={folder}/text.npz/run": "text.npz",
    "participation=dynamic participation.per_round=2": "participation.sampler.live=250 exceeds",
    "gc.boundary=null": "gc.boundary and lam are null",
    f"data=tiny_shakespeare data.dataset._target_={__name__}.play": "MLP cannot read: take model=",
    "data=matrix_regression model=lstm": "CharLSTM cannot read: take model=mlp",
    "data.num_classes=7": "data.num_classes=7",
    "+client.optimizer.foo=1": "client.optimizer",
    "task._target_=gcfed.nowhere.Task": "task: ImportError",
    "+data.dataset.download=false": "data.dataset.download",
    "+callbacks.x._target_=gcfed.methods.correction.scaffold.Scaffold": "callbacks: Scaffold is",
    "+logger.x._target_=torch.nn.ReLU": "logger: ReLU is not a Logger of Lightning",
    "algorithm=feddyn aggregator=median": "FedDyn needs",
    "data.dataset.data_dir=3": "data.dataset.data_dir",
    "algorithm=fedadam server.tau=1e30": "server.tau",
    "data.transform.flip=3": "data.transform.flip",
    "partition.min_size=1.5": "partition.min_size",
    "gc.boundary=3": "gc.boundary",
    "algorithm=fedavg gc.boundary=fc1": "gc.boundary has no effect without gc=gcfed or",
    "trainer.accelerator=mps": "trainer.accelerator",
    "trainer.precision=bf16-mixed": "trainer.precision",
    "name=../../escape": "name",
    "participation.faults.dropout=1": "participation.faults.dropout",
    "optimized_metric=3": "optimized_metric",
    "paths.log_dir=": "paths.log_dir= names no folder",
    "hydra.run.dir=''": "hydra.run.dir='' names no folder",
    "optimized_metric=test/acc": "optimized_metric=test/acc has no effect without a search",
    "attack=sign_flip attack.clients=20%": "20% must be a number (20 % is 0.2)",
    "data=csv data.target=y data.path=~/no/x.csv": f"data.path={Path.home()}/no/x.csv",
    'data=csv data.target=y data.path="~/no/x.csv"': f"data.path={Path.home()}/no/x.csv",
    "client_store.folder=''": "client_store.folder",
    "ckpt_path=''": "ckpt_path",
    "paths.log_dir=''": "paths.log_dir",
    "paths.output_dir=null": "paths.output_dir=null must be a text",
    "paths.output_dir=3": "paths.output_dir=3 must be a text",
    "paths.data_dir=''": "paths.data_dir",
    "participation.num_clients=0": "participation.num_clients",
    "callbacks.checkpoint.every=1.5": "callbacks.checkpoint.every",
    "participation.per_round=2.5": "participation.per_round",
    "data.input_shape=[1,9,9]": "data.input_shape",
}


def play(data_dir, download):
    """A user's own text as the data set."""
    split = Split(np.zeros((598, 80), np.uint8), np.arange(598) % 6, np.arange(598) % 299)
    return FederatedDataset("a play", 6, split, split)


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """``typed("rounds=0")`` calls ``gcfed-train`` in this process; returns its status, its lines on
    stderr, and the folders that it has left.
    """
    (tmp_path / "text.npz").write_text("no arrays")
    np.savez(tmp_path / "x.npz", x=np.zeros((60, 4), np.float32), y=np.arange(60) % 3)
    # Hydra's handlers would write to the folder of the refused run for the rest of this process
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # a refused name leaves it there

    def call(*words: str, command=commands.train):
        logs = tmp_path / "logs"
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["gcfed-train", *words])
        if command is commands.train:
            sys.argv += [f"paths.log_dir={logs}"]
        status = 0
        try:
            command()
        except SystemExit as end:
            status = end.code
        left = sorted(path.relative_to(logs).as_posix() for path in logs.rglob("*"))
        return status, capsys.readouterr().err.strip().splitlines(), left

    return call


def completed(words: str, folder) -> list[str]:
    """The words after settings of a small run that they do not set themselves."""
    mine = [word.replace("{folder}", str(folder)) for word in words.split()]
    keys = {word.partition("=")[0].lstrip("+") for word in mine}
    if "paths" in keys:
        return mine
    # the last word of -m seed=1 2 follows what it belongs to
    return [*(word for word in SMALL if word.partition("=")[0] not in keys), *mine]


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_word_ends_with_one_line_that_names_it_and_leaves_no_folder(typed, tmp_path, words):
    status, lines, left = typed(*completed(words, tmp_path))
    assert status == 1
    assert len(lines) == 1, "\n".join(lines)
    assert WRONG[words].replace("{folder}", str(tmp_path)) in lines[0]
    assert not lines[0].startswith(("Refusal", "ValueError", "BuildError"))
    assert left == []


# Words that some data sets need.
OF_DATA = {
    "arrays": ("data.path={folder}/x.npz",),
    "csv": ("data.path={folder}/x.csv", "data.target=y"),
    "image_folder": ("data.root={folder}/images", "paths.data_dir={folder}"),
    "own": ("data.dataset._target_=gcfed.data.sets.datasets.digits",),
}
OFFLINE = {"digits", "synthetic", "matrix_regression", *OF_DATA}


def few_images(folder):
    """Two classes of twenty images in each split."""
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(20):
                Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(
                    folder / split / name / f"{number}.png"
                )


@pytest.mark.parametrize("data", options("data"))
def test_a_run_that_is_refused_after_its_data_leaves_no_folder(typed, tmp_path, data):
    """With each data set that is here. Of another one, the line names what is missing."""
    few_images(tmp_path / "images")
    rows = [f"{i},{i % 7},{i % 3}\n" for i in range(60)]
    (tmp_path / "x.csv").write_text("".join(["a,b,y\n", *rows]))
    words = [word.replace("{folder}", str(tmp_path)) for word in OF_DATA.get(data, ())]
    words += [f"data={data}", "participation.per_round=100000", "logger=csv"]
    if OmegaConf.select(composer([f"data={data}"]), "data.dataset.download") is not None:
        words.append("data.dataset.download=false")
    status, lines, left = typed(*words)
    assert status == 1
    assert len(lines) == 1, "\n".join(lines)
    assert left == []
    assert "participation.per_round=100000" in lines[0] or data not in OFFLINE, lines[0]


def test_a_folder_of_logs_that_is_no_text_does_not_hide_the_refusal(tmp_path):
    folder = tmp_path / "None" / "digits" / "now"
    folder.mkdir(parents=True)
    remove_refused(OmegaConf.create({"paths": {"log_dir": None, "output_dir": str(folder)}}))
    assert not folder.exists()


def test_a_refused_run_leaves_no_empty_folder_below_logs_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "logs" / "digits" / "now"
    folder.mkdir(parents=True)
    paths = {"log_dir": "~/logs", "output_dir": "~/logs/digits/now"}
    remove_refused(OmegaConf.create({"paths": paths}))
    assert [*(tmp_path / "logs").iterdir()] == []


def test_the_list_is_long():
    assert len(WRONG) >= 60


def test_debug_shows_the_traceback_of_a_refusal(typed, tmp_path):
    _, lines, _ = typed(*completed("partition.alpha=0", tmp_path), "debug=true")
    assert lines[0] == "Traceback (most recent call last):"
    assert "partition.alpha=0" in lines[-1]


@pytest.mark.parametrize("key", ["roots", "out"])
def test_an_empty_path_of_the_report_is_not_the_working_folder(key):
    cfg = OmegaConf.create({"roots": "logs", "out": "x", "measures": None, "figures": True})
    for value in ("", [""]):
        with refuses(rf"{key}.* must be a "):
            commands._report(OmegaConf.merge(cfg, {key: value}))


@pytest.mark.parametrize("typed_measures", ["best:test/acc", ["best:test/acc"]])
def test_the_report_takes_one_measure_without_brackets(monkeypatch, typed_measures):
    given = {}
    monkeypatch.setattr(
        "gcfed.reporting.write_report", lambda *roots, **options: given.update(options)
    )
    cfg = OmegaConf.create({"roots": "logs", "out": "x", "figures": True})
    commands._report(OmegaConf.merge(cfg, {"measures": typed_measures}))
    assert given["measures"] == typed_measures


def test_the_test_of_a_diverged_model_is_printed_as_json(monkeypatch, capsys):
    """JSON has no NaN and no Infinity; strict readers such as jq refuse them."""
    figures = {"round": 3, "test/acc": 0.5, "test/loss": math.nan, "test/rmse": math.inf}
    monkeypatch.setattr("gcfed.run.evaluate", lambda cfg: figures)
    commands._evaluate(OmegaConf.create())
    assert capsys.readouterr().out == (
        '{"round": 3, "test/acc": 0.5, "test/loss": null, "test/rmse": null}\n'
    )


def test_the_version(monkeypatch, capsys):
    from gcfed import __version__

    monkeypatch.setattr(sys, "argv", ["gcfed-train", "--version"])
    commands.train()
    assert capsys.readouterr().out == f"gcfed {__version__}\n"
