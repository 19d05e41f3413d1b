"""The command line as a user types it.

Most tests run it in a fork, which need not import torch again.
"""

import json
import multiprocessing
import os
import signal
from types import SimpleNamespace

import kill
import pytest
import torch
from conftest import forked, read_rows, run_script, type_command
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FAST = [
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=50",
    "model.hidden=[32]",
]
SAME = ("train/loss", "test/acc", "test/acc_ema", "test/acc_smooth10", "comm/up_bytes")
pytestmark = pytest.mark.slow


def model(folder):
    return load_file(folder / "global_model.safetensors")


def the_run(logs):
    (folder,) = [p.parent for p in logs.glob("*/*/config.yaml")]
    return folder


def test_a_run_is_killed_and_continues_in_its_folder(tmp_path, unrendered):
    """A run that is killed (SIGKILL) and continued with ckpt_path=last equals a run without an
    interruption.

    The killed run has two processes, the other run has one. Each process has one thread.
    """
    args = ["rounds=8", "targets=[0.02]", "trainer.accelerator=cpu", "eval_every=3", *FAST]
    args += ["algorithm=fedavgm", "client.lr_decay=0.9"]
    two = [
        *args,
        "trainer=ddp",
        "trainer.devices=2",
        "extras.figures=false",
        f"paths.log_dir={tmp_path / 'killed'}",
    ]

    def start():
        os.setsid()
        run_script("train.py", *two)

    fork = multiprocessing.get_context("fork").Process(target=start)
    fork.start()
    process = SimpleNamespace(
        pid=fork.pid, poll=lambda: fork.exitcode, communicate=lambda timeout: (None, fork.join())
    )
    kill.kill_after(process, tmp_path / "killed", 2)
    kill.finish(process)
    assert fork.exitcode == -signal.SIGKILL
    assert 2 <= kill.rounds(tmp_path / "killed") < 8
    assert "resuming" in type_command(tmp_path, "train.py", *two, "ckpt_path=last")
    folder = the_run(tmp_path / "killed")
    said = type_command(
        tmp_path, "train.py", *args, "trainer.devices=1", f"paths.log_dir={tmp_path / 'straight'}"
    )
    for part in ("global model, test accuracy", "to 2%", "seconds a round", "curves.png", "Round"):
        assert part in said
    other = the_run(tmp_path / "straight")
    rows, straight = (read_rows(run / "metrics.csv") for run in (folder, other))
    assert [row["round"] for row in rows] == list(range(1, 9))
    assert [[row.get(key) for key in SAME] for row in rows] == [
        [row.get(key) for key in SAME] for row in straight
    ]
    for name, tensor in model(other).items():
        assert torch.equal(tensor, model(folder)[name])
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in reader.Scalars("test/acc")] == [3, 6, 8]

    folder = folder.rename(tmp_path / 'it\'s, {a=b} "run"')  # special characters of Hydra's grammar
    said = type_command(tmp_path, "eval.py", f"ckpt_path={folder / 'checkpoints/last.ckpt'}")
    metrics = json.loads(said.strip().splitlines()[-1])
    assert metrics["round"] == 8
    assert metrics["test/acc"] == pytest.approx(read_rows(folder / "metrics.csv")[-1]["test/acc"])


def test_a_sweep_makes_a_run_for_each_value(tmp_path):
    small = ["rounds=1", "extras.figures=false", "logger=csv", *FAST]
    args = ["gc.lam=0.0,1.0", "-m", "seed=2", f"paths.log_dir={tmp_path}", *small]

    def rows():
        return {
            file: file.read_text() for file in sorted(tmp_path.glob("*/multirun_*/*/metrics.csv"))
        }

    def sweep_and_continue():
        run_script("train.py", *args)
        before = rows()
        run_script("train.py", *args, "ckpt_path=last")  # all jobs have finished
        assert rows() == before

    assert forked(sweep_and_continue, tmp_path / "printed.txt") == 0, (
        tmp_path / "printed.txt"
    ).read_text()[-4000:]
    folders = [file.parent for file in rows()]
    assert len(folders) == 2
    assert len({folder.parent for folder in folders}) == 1  # one sweep, one folder
    assert all("gc.lam=" in folder.name and "seed=" in folder.name for folder in folders)


def test_the_last_line_of_an_error_names_the_file(tmp_path):
    """Both streams are one file here; test_one_line.py has many more words."""
    words = [f"paths.log_dir={tmp_path / 'logs'}", "ckpt_path=it's.ckpt"]
    last_line = type_command(tmp_path, "train.py", *words, code=1).strip().splitlines()[-1]
    assert "ckpt_path=it's.ckpt: there is no such file" in last_line
    assert list(tmp_path.glob("logs/*/*")) == []  # no folder, and no train.log
