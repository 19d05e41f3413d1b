"""Weights & Biases and MLflow, offline: what they wrote is read back, over a run that is resumed."""

import json
import struct
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Event

import pytest
from conftest import TWO, read_rows
from lightning.pytorch import Callback
from lightning.pytorch.loggers import MLFlowLogger
from PIL import Image

from gcfed.loggers import trackers
from gcfed.loggers.trackers import RoundMLflowLogger
from gcfed.run import train
from gcfed.utils import instantiate
from gcfed.utils.words import show

FAST = ("participation.num_clients=8", "client.epochs=1", "data.limit_train=100", "data.limit_test=40")
pytestmark = pytest.mark.slow


class Picture(Callback):
    """Shows one when the run begins, from the first process, as metrics do."""

    def on_train_start(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir, "picture.png")
        Image.new("RGB", (2, 2)).save(path)
        show(trainer.loggers, "picture", path, trainer.global_step)


def wandb_records(path):
    """The records of an offline run: LevelDB's log, of one protocol buffer each."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's padding
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<xxxxHB", data[at : at + 7])
        if at + 7 + size > len(data):  # it is being written
            return
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(part)
            part = b""


def check_wandb(folder, accuracies):
    until, rows = time.monotonic() + 20, []
    while len(rows) < len(accuracies) and time.monotonic() < until:  # its own process ends the file a little later
        ids, rows, axes, pictures = set(), [], {}, []
        for record in (r for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")) for r in wandb_records(path)):
            ids |= {record.run.run_id} - {""}
            axes[record.metric.glob_name] = record.metric.step_metric
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            rows += [items] * ("test/acc" in items)
            pictures += items.keys() & {"picture"}
    assert ids == {(folder / "wandb.id").read_text()}
    assert axes["*"] == "round"
    assert [(row["round"], row["test/acc"]) for row in rows] == list(enumerate(accuracies, 1))
    assert set(pictures) == {"picture"}


def check_mlflow(folder, address, accuracies):
    from mlflow.tracking import MlflowClient

    killed_before_its_checkpoint = RoundMLflowLogger(str(folder), resume_round=3, tracking_uri=address)
    killed_before_its_checkpoint.log_metrics({"round": 4, "test/acc": accuracies[3]}, 4)  # which is there
    client = MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("gcfed").experiment_id])
    assert run.info.run_id == (folder / "mlflow.id").read_text()
    assert run.info.status == "FINISHED"
    assert (run.info.run_name, run.data.params["gc"]) == ("digits_mlp_gcfed", "gcfed")
    rows = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "test/acc")]
    assert sorted(rows) == list(enumerate(accuracies, 1))
    assert run.data.metrics["test/acc_best"] == max(accuracies)


def test_trackers_have_a_row_a_round_and_a_resumed_run_goes_on_in_theirs(config, tmp_path, monkeypatch):
    """First in two processes, forked before either begins; MLflow in files: its database takes seconds to be made."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    picture = f"+callbacks.picture._target_={__name__}.Picture"
    address = f"file:{tmp_path}/mlruns"
    loggers = ("logger=many", "logger.wandb.offline=true", f"logger.mlflow.tracking_uri={address}")
    for more in (TWO, ("rounds=4", "ckpt_path=last")):
        train(config(*FAST, *loggers, "rounds=2", *more, picture, folder=tmp_path))
    accuracies = [row["test/acc"] for row in read_rows(tmp_path / "metrics.csv")]
    assert len(accuracies) == 4
    check_wandb(tmp_path, accuracies)
    check_mlflow(tmp_path, address, accuracies)


def test_a_tracker_that_does_not_answer_ends_the_run_before_its_first_round(config, tmp_path, monkeypatch):
    """Nor does its constructor: a real one would hold MLflow's lock, for which the next test would wait."""
    monkeypatch.setattr(trackers, "LIMIT", 0.5)
    monkeypatch.setattr(MLFlowLogger, "__init__", lambda *_, **__: Event().wait())
    where = "tracking_uri=http://127.0.0.1:9"
    said = rf"^logger\.mlflow\.{where}: no answer within 0\.5 s\. Make it answer, or leave it out by ~logger\.mlflow\.$"
    with pytest.raises(ValueError, match=said):
        train(config(*FAST, "logger=mlflow", f"logger.mlflow.{where}", folder=tmp_path))
    assert not (tmp_path / "metrics.csv").exists()


def test_a_run_goes_on_without_a_tracker_that_fails_later(config, tmp_path, monkeypatch, caplog):
    """Its second row never arrives, and the third is not waited for, nor is the end."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    plain, told = MLFlowLogger.log_metrics, []

    def log_metrics(self, metrics, step=None):
        told.append(step)
        if step == 2:
            Event().wait()
        plain(self, metrics, step)
        monkeypatch.setattr(trackers, "LIMIT", 0.5)  # from now on

    monkeypatch.setattr(MLFlowLogger, "log_metrics", log_metrics)
    monkeypatch.setattr(MLFlowLogger, "finalize", lambda self, status: Event().wait())
    address = f"logger.mlflow.tracking_uri=file:{tmp_path}/mlruns"
    train(config(*FAST, "rounds=4", "logger=mlflow", address, folder=tmp_path / "run"))
    assert told == [1, 2]
    assert "logger.mlflow: no answer within 0.5 s. The run goes on without it; metrics.csv has all" in caplog.text
    assert [row["round"] for row in read_rows(tmp_path / "run" / "metrics.csv")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("+logger.wandb.bogus=1", "logger.wandb.bogus=1 is no argument of wandb.init"),
        ("logger.wandb.project=a/b", "logger.wandb.project=a/b: .* cannot contain"),
        ("logger.wandb.project=3", "logger.wandb.project=3: .* valid string"),
        ("logger.mlflow.experiment_name=''", "logger.mlflow.experiment_name='' is empty"),
        ("logger.mlflow.tracking_uri=nonsense://x", "logger.mlflow.tracking_uri=nonsense://x: "),
        ("logger.mlflow.tracking_uri=3", "logger.mlflow.tracking_uri=3: "),
    ],
)
def test_their_settings_are_checked_before_there_is_a_folder(config, tmp_path, word, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        train(config(*FAST, "logger=many", "logger.wandb.offline=true", word, folder=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("found", [None, ModuleSpec("wandb", None)], ids=["nothing", "a folder"])
def test_a_missing_package_is_named_with_its_command(config, tmp_path, monkeypatch, found):
    monkeypatch.setattr(instantiate, "find_spec", lambda name: found)
    with pytest.raises(ValueError, match=r"logger=wandb needs a package: .* -e '\.\[wandb\]'"):
        train(config(*FAST, "logger=wandb", folder=tmp_path))
