"""``failure.txt``: the record of a run that ended with an error."""

import re
import resource
import sys

import pytest
from harness import Spy

from gcfed.checkpoints.reading import load_checkpoint
from gcfed.checkpoints.writing import AtomicCheckpointIO
from gcfed.folders.failure import failure_recorded, headline
from gcfed.folders.folder import CHECKPOINT, EXPORT, FAILURE, ending
from gcfed.folders.reading import read_metrics
from gcfed.run import train

FAST = (
    "rounds=3",
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
)
ERRORS = {"key": KeyError("a key"), "text": ValueError("two\n  lines")}


class FailIn(Spy):
    """Raises an error in the second round."""

    def __init__(self, error):
        self.error = ERRORS.get(error)

    def on_aggregate_end(self, update, round):
        if self.error is not None and round.index == 1:
            raise self.error


def test_an_error_of_a_file_has_a_plain_headline(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as error:
        (tmp_path / "file/run").mkdir()
    assert headline(error.value) == f"Not a directory: '{tmp_path}/file/run'"
    assert headline(OSError("lost")) == "OSError: lost"


def test_ctrl_c_outside_of_the_rounds_is_recorded_as_the_signal(tmp_path):
    """As while data are read, or while the partition is drawn."""
    with pytest.raises(KeyboardInterrupt), failure_recorded(tmp_path, write=True):
        raise KeyboardInterrupt
    first, *_ = (tmp_path / FAILURE).read_text().splitlines()
    assert first == "Stopped by SIGINT."
    state, _ = ending(tmp_path, 5, {}, read_metrics(None))
    assert state == "interrupted"


def run(config, folder, error, *overrides):
    fail = (
        f"+callbacks.fail._target_={__name__}.FailIn",
        f"+callbacks.fail.error={error or 'null'}",
    )
    return train(config(*FAST, *fail, *overrides, folder=folder))


def test_an_error_is_recorded_and_a_resumed_run_removes_the_record(config, tmp_path):
    path = tmp_path / "run" / FAILURE
    with pytest.raises(ValueError, match="two"):
        run(config, tmp_path / "run", "text")
    first, *rest = path.read_text().splitlines()
    assert first == "ValueError: two lines"
    assert "Traceback (most recent call last):" in rest
    assert any("on_aggregate_end" in line for line in rest)
    # refused, so the folder does not change
    with pytest.raises(ValueError, match="belongs to another run"):
        run(config, tmp_path / "run", "none", "ckpt_path=last", "seed=2")
    assert path.read_text().startswith(first)
    run(config, tmp_path / "run", "none", "ckpt_path=last")
    assert not path.exists()


def test_a_run_that_failed_before_its_first_checkpoint_starts_again_in_its_folder(config, tmp_path):
    late = ("callbacks.checkpoint.every=3", "eval_every=3")
    with pytest.raises(KeyError):
        run(config, tmp_path, "key", *late)
    assert (tmp_path / FAILURE).read_text().startswith("KeyError: 'a key'\n")
    assert read_metrics(tmp_path / "metrics.csv").index.tolist() == [1]
    run(config, tmp_path, "none", *late, "logger=none")
    left = {path.name for path in tmp_path.iterdir()}
    assert {FAILURE, "metrics.csv", "summary.json", EXPORT.name} & left == {EXPORT.name}


class FullFrom(Spy):
    """From the second round on, no file can exceed 100 kB.

    The error is like that of a full disk.
    """

    def __init__(self, error):
        self.index = 1 if error else 99

    def on_broadcast(self, download, round):
        if round.index == self.index:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("algorithm", "file"),
    [("fedavg", "checkpoints/last.ckpt"), ("scaffold", r"clients/scaffold/0/\d+-1.bin")],
)
def test_a_full_disk_names_the_file_and_loses_nothing(
    config, tmp_path, monkeypatch, algorithm, file
):
    monkeypatch.setattr(sys.modules[__name__], "FailIn", FullFrom)
    save = AtomicCheckpointIO.save_checkpoint  # the first one is written before the disk is full
    monkeypatch.setattr(
        AtomicCheckpointIO,
        "save_checkpoint",
        lambda self, *args, **kw: (save(self, *args, **kw), self.wait()),
    )
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            run(config, tmp_path / "run", "full", f"algorithm={algorithm}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert re.search(rf"{tmp_path}/run/{file}'", str(raised.value))
    assert load_checkpoint(tmp_path / "run" / CHECKPOINT)["global_step"] == 1
    assert (
        run(config, tmp_path / "run", None, f"algorithm={algorithm}", "ckpt_path=last").metrics[
            "round"
        ]
        == 3
    )
