"""Kills during checkpoints, and the samples that each process tests."""

import math
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from gcfed.checkpoints.writing import AtomicCheckpointIO
from gcfed.utils.instantiate import build


def test_a_kill_during_writing_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    needed = tmp_path / "needed"
    needed.touch()
    io.save_checkpoint({"round": 1}, path)
    io.wait()

    def half(file):
        os.ftruncate(file, 100)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", half)
    io.save_checkpoint({"round": 2}, path)
    io.then_delete([needed])
    with pytest.raises(KeyboardInterrupt):
        io.save_checkpoint({"round": 3}, path)
    assert torch.load(path, weights_only=True) == {"round": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "needed"]


def test_the_rows_of_rounds_are_on_the_disk_before_their_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoints" / "last.ckpt"
    io = AtomicCheckpointIO()
    synced = []
    (tmp_path / "metrics.csv").write_text("round\n1\n")
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, path.exists()))
    )
    io.save_checkpoint({"round": 1}, path)
    io.teardown()
    assert synced == [
        (path.stat().st_ino, False),
        ((tmp_path / "metrics.csv").stat().st_ino, False),
    ]


def test_the_next_round_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """A round trains while the checkpoint is written.

    No file is deleted before the checkpoint is on the disk.
    """
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    old = tmp_path / "old"
    weights = torch.ones(3)
    disk = threading.Event()
    old.touch()
    monkeypatch.setattr(os, "fsync", lambda _: disk.wait(60))
    io.save_checkpoint({"weights": weights}, path)
    io.then_delete([old])
    weights.zero_()
    assert old.exists()
    assert not path.exists()
    disk.set()
    io.teardown()
    assert torch.load(path, weights_only=True)["weights"].tolist() == [1, 1, 1]
    assert not old.exists()


@pytest.mark.parametrize("world", [1, 7])
def test_every_process_tests_a_part_of_the_test_split(config, world):
    data = build(config("data.eval_batch_size=50").data)
    data.setup()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    slices = []
    for rank in range(world):
        data.trainer = SimpleNamespace(world_size=world, global_rank=rank, strategy=strategy)
        (loader,) = data.val_dataloader()
        mine = list(loader)
        assert mine
        slices += mine
    covered = sorted(i for start, stop in slices for i in range(start, stop))
    assert covered == list(range(360))
    assert max(stop - start for start, stop in slices) <= min(50, math.ceil(360 / world))
