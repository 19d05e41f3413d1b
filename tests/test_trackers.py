"""Weights & Biases and MLflow run offline, and their files are read back."""

import json
import struct

import pytest
from conftest import TWO, read_rows, type_command

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

    data = path.read_bytes()
    at = 7
    part = b""
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


def wandb_items(record):
    """The values of a row by name; those of a picture are ``name.filenames``, ``name.width``, …"""
    return {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for item in record.history.item
    }


def wandb_run(folder):
    """Id and group of the only W&B run in a folder, which may have been continued."""
    paths = folder.glob("wandb/offline-run-*/*.wandb")
    records = [record.run for path in paths for record in wandb_records(path)]
    ((identifier, group),) = {(run.run_id, run.run_group) for run in records if run.run_id}
    return identifier, group


def wandb_rows(folder):
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for record in wandb_records(path):
        items = wandb_items(record)
        if "test/acc" in items:
            yield items["trainer/global_step"], items["test/acc"]
        elif name := record.run.display_name:
            yield name


@pytest.fixture
def loggers(tmp_path, monkeypatch):
    """The overrides of both trackers offline. MLflow writes files, because creating its database
    takes seconds.
    """
    import wandb

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # It would keep its hands on this process's streams.
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    # this, and jobs of W&B Launch, take two seconds
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")
    monkeypatch.setattr(wandb.Run, "_detect_and_apply_job_inputs", lambda self: None, raising=False)
    address = f"file:{tmp_path}/mlruns"
    return ("logger=many", "logger.wandb.offline=true", f"logger.mlflow.tracking_uri={address}")


def mlflow_runs(loggers):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(loggers[-1].partition("=")[2])
    return client, client.search_runs([client.get_experiment_by_name("gcfed").experiment_id])


def test_trackers_have_one_row_per_round_and_do_not_mix_runs(config, tmp_path, loggers):
    """The first run has two processes."""
    import wandb

    for name, more in (("two", TWO), ("other", ("seed=2",))):
        train(config(*FAST, *loggers, "rounds=2", *more, "name=mlp", folder=tmp_path / name))
    wandb.teardown()  # waits until its process has written everything
    client, runs = mlflow_runs(loggers)
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


def test_a_resumed_run_continues_at_its_trackers(config, tmp_path, loggers):
    import wandb

    folder = tmp_path / "run"
    train(config(*FAST, *loggers, "rounds=2", folder=folder))
    wandb.teardown()
    first, group = wandb_run(folder)
    train(config(*FAST, *loggers, "rounds=3", "ckpt_path=last", folder=folder))
    wandb.teardown()
    assert len([*folder.glob("wandb/offline-run-*")]) == 2  # sent to one run by wandb sync
    assert wandb_run(folder) == (first, group)
    assert group == ""
    client, (run,) = mlflow_runs(loggers)
    steps = sorted(m.step for m in client.get_metric_history(run.info.run_id, "test/acc"))
    assert steps == [1, 2, 3]
    assert run.data.params["rounds"] == "2"  # of its start, as in TensorBoard
    # a run that begins anew in its folder is another run
    (folder / "checkpoints" / "last.ckpt").unlink()
    for file in ("summary.json", "metrics.csv", "global_model.safetensors"):
        (folder / file).unlink()
    train(config(*FAST, *loggers, "rounds=1", folder=folder))
    assert len(mlflow_runs(loggers)[1]) == 2


def test_wandb_has_the_pictures_of_a_run(config, tmp_path, loggers):
    import wandb

    folder = tmp_path / "run"
    settings = (*FAST, "logger=wandb", "logger.wandb.offline=true", "extras.figures=true")
    train(config(*settings, "rounds=2", folder=folder))
    wandb.teardown()  # waits until its process has written everything
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    shown = {}
    for record in wandb_records(path):
        items = wandb_items(record)
        for name in ("partition", "curves"):
            for file in items.get(f"{name}.filenames", ()):
                picture = (path.parent / "files" / file).read_bytes()
                shown[name] = (items["trainer/global_step"], picture)
    assert shown == {
        "partition": (0, (folder / "partition.png").read_bytes()),
        "curves": (2, (folder / "curves.png").read_bytes()),
    }


def test_the_jobs_of_a_sweep_are_one_group(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")
    words = (*FAST, "rounds=1", "trainer.devices=1", "extras.figures=false", "seed=1,2", "-m")
    words += ("logger=wandb", "logger.wandb.offline=true", f"hydra.sweep.dir={tmp_path}/both")
    type_command(tmp_path, "train.py", *words)
    jobs = [file.parent for file in tmp_path.glob("both/*/summary.json")]
    runs = [wandb_run(folder) for folder in jobs]
    assert [group for _, group in runs] == ["both", "both"]
    assert len({identifier for identifier, _ in runs}) == 2
