"""Signals, closed streams and pipes whose reader has left: how a command ends, and what it says."""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import TWO, composer, forked, run_script
from hydra.core.global_hydra import GlobalHydra

from gcfed.folders.folder import read_run
from gcfed.run import train
from gcfed.utils.resolvers import ROOT
from gcfed.utils.stopped import Stopped, stop

pytestmark = pytest.mark.slow
SMALL = (
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=50",
    "model.hidden=[8]",
    "extras.figures=false",
    "trainer.accelerator=cpu",
    "logger=csv",
)
LAYOUTS = {
    "one process": ("trainer.devices=1",),
    "two processes": TWO,
    "sweep": ("-m", "trainer.devices=1", "seed=1,2,3"),
}


def start(folder: Path, *words: str, stdout: int | None = None) -> int:
    """Forks a command; returns its process id. It prints to a file, or to a descriptor."""
    import torch.utils.tensorboard  # noqa: F401

    composer(())
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        printed = os.open(folder / "printed.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(printed if stdout is None else stdout, 1)
        os.dup2(printed if stdout is None else stdout, 2)
        run_script("train.py", *SMALL, f"paths.log_dir={folder / 'logs'}", *words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code or 0)


def rows(logs: Path) -> int:
    found = list(logs.rglob("metrics.csv"))
    return max((file.read_text().count("\n") - 1 for file in found), default=0)


def ended(child: int) -> int:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the command did not end")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_its_status_and_one_sentence(tmp_path, layout, signum):
    child = start(tmp_path, "rounds=5000", *LAYOUTS[layout])
    while rows(tmp_path / "logs") < 2:
        time.sleep(0.02)
    os.kill(child, signum)
    assert ended(child) == 128 + signum
    *_, last = (tmp_path / "printed.txt").read_text().strip().splitlines()
    finished = rows(tmp_path / "logs")
    sentences = [
        f"Stopped by {signum.name} in round {t} of 5000: repeat the command with ckpt_path=last to"
        " continue."
        for t in range(finished, finished + 3)  # a round has ended before its row is written
    ]
    assert last in sentences  # and not the progress bar
    (failure,) = tmp_path.rglob("failure.txt")  # of the first job: the sweep has ended
    assert failure.read_text().startswith(last)
    assert read_run(failure.parent).state == "interrupted"


def test_a_stopped_run_continues_by_the_words_of_the_sentence(tmp_path):
    child = start(tmp_path, "rounds=40", *LAYOUTS["one process"])
    while rows(tmp_path / "logs") < 2:
        time.sleep(0.02)
    os.kill(child, signal.SIGTERM)
    assert ended(child) == 143
    child = start(tmp_path, "rounds=40", *LAYOUTS["one process"], "ckpt_path=last")
    assert ended(child) == 0
    assert "resuming" in (tmp_path / "printed.txt").read_text()
    assert rows(tmp_path / "logs") == 40


def stop_now(*_):
    stop(signal.SIGTERM, None)


def test_a_signal_before_the_first_checkpoint_does_not_promise_one(config):
    """From Python, too: the handler raises in the first round."""
    stops = (
        "+callbacks.stop._target_=lightning.pytorch.callbacks.LambdaCallback",
        f"+callbacks.stop.on_train_batch_start._target_={__name__}.stop_now",
        "+callbacks.stop.on_train_batch_start._partial_=true",
    )
    cfg = config(*SMALL, *stops, "rounds=3")
    with pytest.raises(Stopped, match=r"SIGTERM in round 1 of 3, before its first check") as raised:
        train(cfg)
    assert raised.value.code == 143


@pytest.mark.parametrize("words", [("trainer.devices=1",), TWO])
def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path, words):
    reader, writer = os.pipe()
    child = start(tmp_path, "rounds=6", *words, stdout=writer)
    os.close(writer)
    while not os.read(reader, 1):
        pass
    os.close(reader)
    assert ended(child) == 0
    assert rows(tmp_path / "logs") == 6
    assert list(tmp_path.rglob("summary.json"))


def test_a_run_goes_on_with_closed_streams(tmp_path):
    """No file that the run opens gets the number of a closed stream."""
    words = [*SMALL, "rounds=3", "trainer.devices=1", f"paths.log_dir={tmp_path}/logs"]

    def run_without_streams():
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        sys.stdin = sys.stdout = sys.stderr = None  # as Python starts with closed streams
        sys.argv = ["train.py", *words]
        GlobalHydra.instance().clear()
        runpy.run_path(str(ROOT / "src/train.py"), run_name="__main__")

    assert forked(run_without_streams, tmp_path / "printed.txt") == 0
    (table,) = tmp_path.rglob("metrics.csv")
    lines = table.read_text().splitlines()
    assert len(lines) == 4
    assert all(line.count(",") == lines[0].count(",") for line in lines)
