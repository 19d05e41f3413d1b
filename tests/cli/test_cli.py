"""The command line as a user types it: each test starts processes, most of them forks, which need not import torch."""

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import kill
import pytest
import torch
from conftest import read_rows, run_script, type_command
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gcfed.utils.resolvers import ROOT

FAST = ["participation.num_clients=8", "client.epochs=1", "data.limit_train=300", "data.limit_test=100"]
pytestmark = pytest.mark.slow


def model(folder):
    return load_file(folder / "global_model.safetensors")


def the_run(logs):
    (folder,) = [p.parent for p in logs.glob("*/*/config.yaml")]
    return folder


def test_a_run_is_killed_and_continues_in_its_folder(tmp_path):
    """kill -9 in the middle, then the same command with ckpt_path=last; equal to a run that nobody disturbed.

    That one has a single process, the other two, with a thread each.
    """
    args = ["rounds=12", "targets=[0.1]", "trainer.accelerator=cpu", *FAST]
    two = [*args, "trainer=ddp", "trainer.devices=2", f"paths.log_dir={tmp_path / 'killed'}"]

    def start():
        os.setsid()
        run_script("train.py", *two)

    fork = multiprocessing.get_context("fork").Process(target=start)
    fork.start()
    process = SimpleNamespace(pid=fork.pid, poll=lambda: fork.exitcode, communicate=lambda timeout: (None, fork.join()))
    kill.kill_after(process, tmp_path / "killed", 3)
    kill.finish(process)
    assert fork.exitcode == -signal.SIGKILL
    assert 3 <= kill.rounds(tmp_path / "killed") < 12
    assert "resuming" in type_command(tmp_path, "train.py", *two, "ckpt_path=last")
    folder = the_run(tmp_path / "killed")
    said = type_command(tmp_path, "train.py", *args, "trainer.devices=1", f"paths.log_dir={tmp_path / 'straight'}")
    for part in ("test accuracy, last round", "to 10%", "seconds a round", "curves.png", "Round"):
        assert part in said
    other = the_run(tmp_path / "straight")
    assert [r["round"] for r in read_rows(folder / "metrics.csv")] == list(range(1, 13))
    assert [r["test/acc"] for r in read_rows(folder / "metrics.csv")] == [
        r["test/acc"] for r in read_rows(other / "metrics.csv")
    ]
    for name, tensor in model(other).items():
        assert torch.equal(tensor, model(folder)[name])
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1  # of one run in two sittings
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in reader.Scalars("test/acc")] == list(range(1, 13))

    folder = folder.rename(tmp_path / 'it\'s, {a=b} "run"')  # Hydra's grammar has words for all of these
    said = type_command(tmp_path, "eval.py", f"ckpt_path={folder / 'checkpoints/last.ckpt'}")
    metrics = json.loads(said.strip().splitlines()[-1])
    assert metrics["round"] == 12
    assert metrics["test/acc"] == pytest.approx(read_rows(folder / "metrics.csv")[-1]["test/acc"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("delay", [0, 0.6, 1.5])
def test_a_signal_in_the_first_seconds_ends_in_one_sentence_and_leaves_nothing(tmp_path, delay):
    """While Python imports, Hydra composes and torch is imported, in which an exception may get lost."""
    heard = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    signum = random.choice(heard)  # a shell has its jobs in the background ignore SIGINT
    command = [sys.executable, str(ROOT / "src/train.py"), "rounds=3000", f"paths.log_dir={tmp_path / 'logs'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1], 16) >> 14 & 1:
        time.sleep(0.001)  # until SIGTERM is heard: Python itself has just begun
    time.sleep(delay)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == (f"Stopped: asked to end by {signum.name}.\n", 128 + signum)
    assert [*tmp_path.glob("logs/*")] == []


def test_a_sweep_makes_a_run_for_each_value(tmp_path):
    small = ["rounds=1", "model.hidden=[8]", "extras.figures=false", "logger=csv", *FAST]
    args = ["gc.lam=0.0,1.0", "-m", "seed=2", f"paths.log_dir={tmp_path}", *small]
    type_command(tmp_path, "train.py", *args)
    folders = sorted(p.parent for p in tmp_path.glob("*/multirun_*/*/summary.json"))
    assert len(folders) == 2
    assert len({f.parent for f in folders}) == 1  # one sweep, one folder
    assert all("gc.lam=" in f.name and "seed=" in f.name for f in folders)
    before = {f: (f / "metrics.csv").read_text() for f in folders}
    type_command(tmp_path, "train.py", *args, "ckpt_path=last")  # nothing is left to do, and nothing is lost
    assert {f: (f / "metrics.csv").read_text() for f in folders} == before
    assert len(list(tmp_path.glob("*/multirun_*"))) == 1


def test_a_command_behind_which_nobody_reads_on_ends_quietly_under_its_own_name(tmp_path):
    """``gcfed-train --help | head -1``."""
    (tmp_path / "gcfed-train").symlink_to(ROOT / "src/train.py")
    command = [sys.executable, str(tmp_path / "gcfed-train"), "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
    said = type_command(tmp_path, "train.py", "--help")
    assert said.startswith("Trains: python src/train.py experiment=")


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_a_run_whose_streams_are_closed_ends_well(tmp_path, closed):
    """``>&-``, by which the first file that is opened would be the standard output."""
    words = ["rounds=1", f"hydra.run.dir={tmp_path}/run", "extras.figures=false", *FAST]
    command = [sys.executable, str(ROOT / "src/train.py"), *words]
    printed = subprocess.run(
        command, preexec_fn=lambda: [os.close(n) for n in closed], stderr=subprocess.PIPE, text=True
    )
    assert (printed.returncode, "Error" in printed.stderr) == (0, False), printed.stderr
    assert len(read_rows(tmp_path / "run/metrics.csv")) == 1


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("gcc=local", "gcc=local sets nothing: did you mean gc?"),
        ("rounds", "rounds is no setting: write rounds=<value>, one word without spaces. (HYDRA"),
        ("seed=1,2,3", "seed=1,2,3 is a sweep: add -m; a list is 'seed=[1,2,3]'. (HYDRA"),
        ("seed=3,4,3", "seed=3,4,3 has a value twice: that would be the same run in one folder. (HYDRA"),
        (
            "gc=[local,null]",
            "gc=[local,null] names no option of gc: choose gcfed, global, local, none, warmup, or ~gc for none.",
        ),
        ("name=${nope}", "Interpolation key 'nope' not found"),
        ("ckpt_path=it's.ckpt", "ckpt_path=it's.ckpt: there is no such file."),
        ("hydra.run.dir={tmp_path}/file/run", "/file/run cannot be written: Not a directory; "),
        ("hydra.run.dir={tmp_path}/run", "/run/train.log cannot be written: Is a directory; "),
    ],
)
def test_an_error_is_one_clear_sentence(tmp_path, word, sentence):
    """Also before Hydra calls the run."""
    (tmp_path / "file").touch()
    (tmp_path / "run" / "train.log").mkdir(parents=True)
    word = word.replace("{tmp_path}", str(tmp_path))
    said = type_command(tmp_path, "train.py", f"paths.log_dir={tmp_path / 'logs'}", word, code=1)
    assert sentence in said
    assert "Traceback" not in said
    assert list(tmp_path.glob("logs/*")) == []
