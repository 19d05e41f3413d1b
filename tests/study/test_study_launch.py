"""What becomes of a job that fails, configs that are composed once, and the lock on what one process does."""

import gc
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from pretend import GROUPS, composed

from gcfed.study.launch import launch
from gcfed.utils import lock
from gcfed.utils.compose import Composer
from gcfed.utils.lock import locked


class Model:
    """Stands for what fills the GPU."""


def test_a_failed_job_lets_go_of_its_model():
    """Of those in the frames of its causes, too, and without a collection of garbage."""
    alive = []

    def train():
        model = Model()
        alive.append(weakref.ref(model))
        raise RuntimeError("out of memory")

    def job():
        data = Model()
        alive.append(weakref.ref(data))
        try:
            train()
        except RuntimeError as error:
            raise ValueError("lower\nclient.batch_size") from error

    def run(job_overrides, initial_job_idx):
        result = JobReturn(status=JobStatus.FAILED)
        try:
            job()
        except ValueError as error:
            result.return_value = error
        return [result]

    gc.disable()
    try:
        (outcome,) = launch(SimpleNamespace(launch=run), [["a=1"]], 0)
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()
    assert (outcome.reason, outcome.lost) == ("ValueError: lower client.batch_size", False)


# ------------------------------------------------------------------------------------------------ composing
def as_hydra(overrides):
    return OmegaConf.to_container(composed(*overrides), resolve=False)


def test_what_is_shared_is_what_hydra_composes():
    loaded = []

    def load(overrides):
        loaded.append(overrides)
        return composed(*overrides)

    compose = Composer(load, GROUPS)
    cells = [
        [f"gc={gc_}", f"partition.alpha={alpha}", "experiment=cifar10_cnn_gcfed", "rounds=7", "targets=[0.5]"]
        for gc_ in ("none", "gcfed")
        for alpha in (0.1, 1)
    ]
    for cell in cells:
        assert OmegaConf.to_container(compose(cell), resolve=False) == as_hydra(cell)
    assert loaded == [["gc=none", "experiment=cifar10_cnn_gcfed"], ["gc=gcfed", "experiment=cifar10_cnn_gcfed"]]
    added = ["gc=none", "+client.new=3", "rounds=7", "~targets"]
    with pytest.raises(ValueError, match=r"targets|client"):
        compose([*added, "client.newer=3"])
    assert OmegaConf.to_container(compose(added), resolve=False) == as_hydra(added)
    assert loaded[-1] == added
    compose(cells[0]).rounds = 1  # the caller's own
    assert compose(cells[0]).rounds == 7


# ------------------------------------------------------------------------------------------------ the lock
def test_a_lock_is_held_by_one_and_ends_with_its_process(tmp_path):
    path = tmp_path / "new" / "a.lock"
    code = (
        "import sys, time; from pathlib import Path; from gcfed.utils.lock import locked\n"
        "with locked(Path(sys.argv[1])) as holder:\n print(holder, flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "\n"
        with locked(path) as holder:
            assert holder.startswith(f"process {other.pid} on ")
    finally:
        other.kill()
        other.communicate()
    with locked(path) as holder:
        assert holder == ""
        with locked(path) as second:
            assert second.startswith(f"process {os.getpid()} on ")
    with locked(path) as holder:
        assert holder == ""


def test_without_locks_everyone_is_let_in_with_a_warning(tmp_path, monkeypatch, caplog):
    def flock(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=1, LOCK_NB=2))
    with locked(tmp_path / "a") as holder:
        assert holder == ""
    assert "Operation not supported. Start what runs here in one process at a time" in caplog.text
