"""Checkpoints are refused if they are damaged, or if the run or its data have changed."""

import json
import os
import re
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import contents, read_rows, refuses
from harness import Spy
from safetensors.torch import save_file

from gcfed.checkpoints.reading import (
    checkpoint_of,
    load_checkpoint,
    load_weights,
)
from gcfed.checkpoints.record import checksum, fingerprint
from gcfed.data.base import Split
from gcfed.data.partition import Partition
from gcfed.run import evaluate, train

FAST = (
    "rounds=2",
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "model.hidden=[8]",
)


def test_ckpt_path_last_without_an_earlier_run_starts_only_jobs_of_a_sweep(
    config, tmp_path, monkeypatch
):
    cfg = config(*FAST, "ckpt_path=last", folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="ckpt_path=last: no earlier run"):
        train(cfg)
    monkeypatch.setattr("gcfed.checkpoints.reading.in_sweep", lambda: True)
    assert train(cfg).metrics["round"] == 2


def test_ckpt_path_last_tells_what_differs_from_the_newest_run(config, tmp_path):
    train(config(*FAST, "client.optimizer.lr=0.01", folder=tmp_path / "earlier"))
    cfg = config(*FAST, "client.optimizer.lr=0.5", "ckpt_path=last", folder=tmp_path / "new")
    with refuses(r"The newest one there, earlier, .*: client\.optimizer\.lr is 0\.01 there, 0\.5"):
        train(cfg)
    (tmp_path / "earlier" / "config.yaml").write_text("a: [")
    with refuses(r"would be [^)]*/new\)\. Repeat the overrides"):
        train(cfg)


def test_a_folder_in_place_of_a_checkpoint_is_refused(config, tmp_path):
    sentence = re.escape(f"ckpt_path={tmp_path}: there is no such file. Set ckpt_path=<run>/")
    with refuses(sentence):
        load_weights(str(tmp_path))
    with refuses(sentence):
        checkpoint_of(config(f"ckpt_path={tmp_path}"), tmp_path / "run")


@pytest.mark.parametrize("scaling", ["[", "[1]", '{"mean": ["a"]}', '{"mean": {"a": 1}}'])
def test_a_model_with_another_kind_of_scaling_is_refused(tmp_path, scaling):
    path = tmp_path / "global_model.safetensors"
    save_file({"w": torch.zeros(1)}, path, metadata={"round": "1", "scaling": scaling})
    with refuses(f"^ckpt_path={re.escape(str(path))} is damaged"):
        load_weights(str(path))


def test_a_test_without_a_model_says_what_to_name(config):
    with refuses("^name the model to test: ckpt_path=<run>/checkpoints/last.ckpt"):
        evaluate(config())


def test_a_resumed_run_knows_the_processes_of_its_earlier_rounds(config, tmp_path):
    """A client's seconds are those of a process. So each round counts the processes it had."""

    def go(rounds, devices, *overrides):
        words = (*FAST, f"rounds={rounds}", f"trainer.devices={devices}", *overrides)
        return train(config(*words, folder=tmp_path / "run"))

    go(2, 2)
    go(3, 1, "ckpt_path=last")
    result = go(3, 2, "ckpt_path=last")  # trains nothing
    record = load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["gcfed"]
    assert record["processes"] == {1: 2, 3: 1}
    seconds = result.frame["time/train_s"] * [2, 2, 1] / result.frame["train/clients"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["client_seconds"] == seconds.median()


def test_a_resumed_run_knows_the_versions_of_its_earlier_rounds(
    config, tmp_path, monkeypatch, caplog
):
    """Numbers may change between versions, so the run of two versions says so."""
    folder = tmp_path / "run"

    def go(rounds, version, *overrides):
        monkeypatch.setattr("gcfed.checkpoints.record.__version__", version)
        train(config(*FAST, f"rounds={rounds}", *overrides, folder=folder))
        return json.loads((folder / "summary.json").read_text())["version"]

    assert go(1, "0.2.0") == "0.2.0"
    assert go(2, "0.2.0", "ckpt_path=last") == "0.2.0"
    assert "trained the first" not in caplog.text
    assert go(3, "0.3.0", "ckpt_path=last") == "0.2.0, 0.3.0"
    assert "version 0.2.0 trained the first 2 rounds of this run, and 0.3.0 trains" in caplog.text
    assert go(3, "0.4.0", "ckpt_path=last") == "0.2.0, 0.3.0"  # trains nothing


def test_a_checkpoint_without_its_clients_states_is_refused_before_a_file_changes(config, tmp_path):
    def go(rounds, *overrides):
        return train(
            config(
                *FAST, "algorithm=scaffold", f"rounds={rounds}", *overrides, folder=tmp_path / "run"
            )
        )

    go(1)
    aside = tmp_path / "run/checkpoints/aside.ckpt"
    shutil.copy(tmp_path / "run/checkpoints/last.ckpt", aside)
    go(2, "ckpt_path=last")
    before = contents(tmp_path / "run")
    with refuses(r"-0\.bin is not there: it is a client's state"):
        go(3, f"ckpt_path={aside}")
    assert contents(tmp_path / "run") == before


def test_data_that_have_changed_are_refused_by_part(config, tmp_path):
    """A resumed run notices one changed number in any split."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    content = {"x": x[:40], "y": np.arange(40) % 3, "x_test": x[40:], "y_test": np.arange(20) % 3}

    def go(*overrides, **changed):
        np.savez(tmp_path / "x.npz", **content | changed)
        own = (
            "data=arrays",
            f"data.path={tmp_path}/x.npz",
            "data.validation=0.2",
            "participation.num_clients=4",
            "participation.per_round=2",
            "client.epochs=1",
            "partition=iid",
        )
        return train(config(*own, *overrides, folder=tmp_path / "run"))

    go("rounds=1")
    for key, part in (("x_test", "test samples"), ("y", "labels")):
        other = content[key].copy()
        other.flat[0] = 0 if other.flat[0] else 1
        with refuses(rf"the data have changed since: [^.]*{part}.*Put the old files back"):
            go("rounds=2", "ckpt_path=last", **{key: other})
    assert go("rounds=2", "ckpt_path=last").frame.index.tolist() == [1, 2]


def test_checksums_name_the_part_of_the_data_that_has_changed():
    def parts(x=(1, 2, 3), y=(0, 1, 2), indices=(2, 0, 1)):
        split = Split(np.array(x, np.uint8)[:, None], np.array(y))
        partition = Partition(np.array(indices), np.array((0, 1, 3)))
        return fingerprint(SimpleNamespace(splits={"training": split}, partition=partition))

    others = {
        "training samples": parts(x=(1, 3, 2)),
        "training labels": parts(y=(0, 1, 1)),
        "clients": parts(indices=(0, 1, 2)),
    }
    for name, other in others.items():
        assert {key for key, value in parts().items() if other[key] != value} == {name}
    zeros = [np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.uint8), np.zeros((2, 3), np.int8)]
    assert len({*map(checksum, zeros)}) == 3
    view = np.arange(6).reshape(3, 2)
    assert checksum(view) == checksum(np.asfortranarray(view)) != checksum(view[::-1])
    assert checksum(np.arange(3)) == "31a469da"  # the same on all machines


def test_a_resumed_run_writes_the_results_that_a_kill_prevented(config, tmp_path):
    train(config(*FAST, folder=tmp_path))
    names = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    (tmp_path / "global_model.safetensors").unlink()
    (tmp_path / "summary.json").unlink()
    (tmp_path / ".global_model.safetensors.123.safetensors").touch()
    train(config(*FAST, "ckpt_path=last", folder=tmp_path))
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == names


class CopyIn(Spy):
    """Copies the run's folder when the fourth round begins, as a kill at that moment would leave
    it.
    """

    disk = threading.Event()

    def __init__(self, folder, copy):
        self.folder = folder
        self.copy = copy

    def on_broadcast(self, download, round):
        if round.index == 3:
            shutil.copytree(self.folder, self.copy)
            self.disk.set()


def test_a_kill_while_a_checkpoint_is_written_loses_one_round(config, tmp_path, monkeypatch):
    """When the fourth round begins, the third checkpoint still waits for the disk.

    The second one is whole.
    """
    run = tmp_path / "run"
    killed = tmp_path / "killed"
    fsync = os.fsync

    def slow(file):
        written = [path.stat().st_ino for path in run.glob("checkpoints/.last.ckpt*")]
        if os.fstat(file).st_ino in written and len(read_rows(run / "metrics.csv")) == 3:
            assert CopyIn.disk.wait(60)
        fsync(file)

    scaffold = (*FAST, "rounds=5", "algorithm=scaffold", "participation.per_round=4")
    straight = train(config(*scaffold, folder=tmp_path / "straight"))
    copy = [f"+callbacks.copy._target_={__name__}.CopyIn"]
    copy += [f"+callbacks.copy.folder={run}", f"+callbacks.copy.copy={killed}"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        train(config(*scaffold, *copy, folder=run))
    assert load_checkpoint(killed / "checkpoints/last.ckpt")["global_step"] == 2
    # it repeats round 3
    assert [row["round"] for row in read_rows(killed / "metrics.csv")] == [1, 2, 3]
    resumed = train(config(*scaffold, "ckpt_path=last", folder=killed))
    assert [row["round"] for row in read_rows(killed / "metrics.csv")] == [1, 2, 3, 4, 5]
    assert all(map(torch.equal, resumed.module.net.parameters(), straight.module.net.parameters()))
