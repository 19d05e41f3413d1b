"""Weights & Biases and MLflow run offline, and their files are read back."""

import json
import struct

import pytest
from conftest import TWO, read_rows

from gcfed.run import train

FAST = (
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "model.hidden=[8]",
)
pytestmark = pytest.mark.slow


def wandb_records(path):
    """The records of an offline run.

    The file is a LevelDB log, and each record is a protocol buffer.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's padding
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<xxxxHB", data[at : at + 7])
        if at + 7 + size > len(data):  # an incomplete record
            return
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part of a record
            yield Record.FromString(part)
            part = b""


def wandb_rows(folder):
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for record in wandb_records(path):
        items = {
            (item.key or item.nested_key[0]): json.loads(item.value_json)
            for item in record.history.item
        }
        if "test/acc" in items:
            yield items["trainer/global_step"], items["test/acc"]
        elif name := record.run.display_name:
            yield name


def test_trackers_have_one_row_per_round_and_do_not_mix_runs(config, tmp_path, monkeypatch):
    """The first run has two processes.

    MLflow writes files, because creating its database takes seconds.
    """
    import wandb
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # It would keep its hands on this process's streams.
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    # this, and jobs of W&B Launch, take two seconds
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")
    monkeypatch.setattr(wandb.Run, "_detect_and_apply_job_inputs", lambda self: None, raising=False)
    address = f"file:{tmp_path}/mlruns"
    loggers = ("logger=many", "logger.wandb.offline=true", f"logger.mlflow.tracking_uri={address}")
    for name, more in (("two", TWO), ("other", ("seed=2",))):
        train(config(*FAST, *loggers, "rounds=2", *more, "name=mlp", folder=tmp_path / name))
    wandb.teardown()  # waits until its process has written everything
    client = MlflowClient(address)
    runs = client.search_runs([client.get_experiment_by_name("gcfed").experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {
        "mlp/two": "FINISHED",
        "mlp/other": "FINISHED",
    }
    for run in runs:
        folder = tmp_path / run.info.run_name.removeprefix("mlp/")
        accuracies = [(row["round"], row["test/acc"]) for row in read_rows(folder / "metrics.csv")]
        assert len(accuracies) == 2
        assert run.data.params["gc"] == "gcfed"
        assert (
            sorted(
                (m.step, m.value) for m in client.get_metric_history(run.info.run_id, "test/acc")
            )
            == accuracies
        )
        first, *rows = dict.fromkeys(wandb_rows(folder))
        assert (first, rows) == (run.info.run_name, accuracies)
