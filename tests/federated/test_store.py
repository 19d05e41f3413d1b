"""Clients' states survive rounds, processes and kills.

Checkpoints refer to them and do not copy them.
"""

import os
import shutil
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TWO
from harness import Spy
from omegaconf import open_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gcfed.federated.network.rows import empty_rows
from gcfed.federated.state.store import NONE, ClientStores
from gcfed.run import train

LIKE = {
    "conv": torch.zeros(4, 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last),
    "bias": torch.zeros(5, dtype=torch.float64),
}
ALONE = SimpleNamespace(world_size=1, is_global_zero=True)


def values(*numbers):
    return {
        n: torch.stack(
            [torch.full_like(t, x) + torch.arange(t.numel()).view(t.shape) for x in numbers]
        )
        for n, t in LIKE.items()
    }


def ids(*clients):
    return np.array(clients)


def opened(folder):
    stores = ClientStores(folder=folder)
    stores.names = {"c"}
    return stores


def prune(stores):
    for path in stores.rotate():
        path.unlink(missing_ok=True)


def files(folder):
    return sorted(p.name for p in (folder / "c" / "0").glob("*"))


def test_states_are_read_in_the_models_layout(tmp_path):
    stores = opened(tmp_path)
    stores.write("c", ids(7, 3), values(1.0, 2.0), 0)
    read = stores.read("c", ids(3, 5, 7), LIKE)
    for name in LIKE:
        assert torch.equal(read[name][0], values(2.0)[name][0])
        assert read[name][1].eq(0).all()
        assert torch.equal(read[name][2], values(1.0)[name][0])
        assert read[name].stride() == empty_rows(LIKE[name], 3).stride()
    default = stores.read("c", ids(5), LIKE, default={n: t + 9 for n, t in LIKE.items()})
    assert all(t.eq(9).all() for t in default.values())
    assert stores.versions("c", [3, 5, 7]) == [0, NONE, 0]


def resumed(folder, state):
    """The stores of a run that continues from this state."""
    stores = opened(folder)
    stores.load_state_dict(state)
    stores.require_files()
    stores.start(ALONE)
    return stores


DAMAGES = {
    "swapped": lambda one, other: (other, one),
    "bit-flipped": lambda one, other: (one[:-1] + bytes([one[-1] ^ 1]), other),
    "cut": lambda one, other: (one[:-8], other),
    "empty": lambda one, other: (b"", other),
    "gone": lambda one, other: (None, other),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path, damage):
    """Each read checks the state. A resumed run finds a lost state before it changes a file."""
    stores = opened(tmp_path)
    stores.write("c", ids(1, 2), values(1.0, 2.0), 0)
    state = stores.state_dict()
    paths = [tmp_path / "c" / "0" / f"{client}-0.bin" for client in (1, 2)]
    for path, content in zip(
        paths, DAMAGES[damage](*(path.read_bytes() for path in paths)), strict=True
    ):
        path.unlink() if content is None else path.write_bytes(content)
    if damage == "gone":
        with pytest.raises(ValueError, match=r"1-0\.bin is not there: it is a client's state"):
            resumed(tmp_path, state)
    with pytest.raises(
        ValueError, match=r"1-0\.bin is (damaged|not there): it is a client's state"
    ):
        stores.read("c", ids(1), LIKE)


def test_a_state_of_another_round_store_or_model_is_refused(tmp_path):
    stores = ClientStores(folder=tmp_path)
    stores.names = {"c", "d"}
    for name, t in (("c", 0), ("c", 1), ("d", 1)):
        stores.write(name, ids(1), values(1.0), t)
        if t == 0:
            stores.state_dict()
            stores.rotate()
    for source in ("c/0/1-0.bin", "d/0/1-1.bin"):
        shutil.copy(tmp_path / source, tmp_path / "c/0/1-1.bin")
        with pytest.raises(ValueError, match=r"c/0/1-1\.bin is damaged"):
            stores.read("c", ids(1), LIKE)
    stores.write("c", ids(1), values(1.0), 1)
    with pytest.raises(ValueError, match=r"c/0/1-1\.bin is of another model"):
        stores.read("c", ids(1), {"bias": LIKE["bias"]})


class Delete(Spy):
    """Deletes all clients' states after round 2."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, *_):
        for path in self.folder.glob("clients/*/*/*.bin") if trainer.global_step == 2 else ():
            path.unlink(missing_ok=True)


def test_a_state_lost_during_a_run_ends_it_with_the_name_of_the_file(config, tmp_path):
    fast = (
        "participation.num_clients=5",
        "client.epochs=1",
        "data.limit_train=100",
        "callbacks.checkpoint.every=9",
    )
    cfg = config("algorithm=scaffold", "rounds=4", *fast, *TWO, folder=tmp_path)
    with open_dict(cfg):
        cfg.callbacks.delete = {"_target_": f"{__name__}.Delete", "folder": str(tmp_path)}
    with pytest.raises(
        (ValueError, RuntimeError), match=r"\d-1\.bin is not there: it is a client's state"
    ):
        train(cfg)


def test_a_checkpoint_writes_only_changed_states_and_keeps_those_of_the_last_one(
    tmp_path, monkeypatch
):
    """It also waits until these files are on the disk, because a power failure may empty others."""
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file))
    )

    def inodes(*names):
        return [(tmp_path / "c" / "0" / name).stat().st_ino for name in names]

    stores = opened(tmp_path)
    stores.write("c", ids(1, 2), values(1.0, 2.0), 0)
    first = stores.state_dict()
    assert synced == inodes("1-0.bin", "2-0.bin")
    prune(stores)
    assert files(tmp_path) == ["1-0.bin", "2-0.bin"]

    stores.write("c", ids(2), values(3.0), 1)
    stores.write("c", ids(2), values(4.0), 2)  # no checkpoint refers to the version of round 1
    second = stores.state_dict()
    obsolete = stores.rotate()
    stores.write("c", ids(2), values(5.0), 3)  # the second checkpoint is not yet on the disk
    assert files(tmp_path) == ["1-0.bin", "2-0.bin", "2-2.bin", "2-3.bin"]
    for i, (state, number) in enumerate(((first, 2), (second, 4))):
        shutil.copytree(tmp_path / "c", tmp_path / f"killed{i}" / "c")
        again = resumed(tmp_path / f"killed{i}", state)
        assert again.read("c", ids(1, 2), LIKE)["bias"][:, 0].tolist() == [1, number]
        assert files(tmp_path / f"killed{i}") == ["1-0.bin", f"2-{2 * i}.bin"]

    assert obsolete == [tmp_path / "c" / "0" / "2-0.bin"]
    obsolete[0].unlink()
    assert synced[2:] == inodes("2-2.bin")
    with pytest.raises(ValueError, match=r"2-0\.bin is not there"):
        resumed(tmp_path, first)


def test_a_new_run_in_the_same_folder_starts_without_states(tmp_path):
    """It deletes only the files that a kill left."""
    opened(tmp_path).write("c", ids(1), values(1.0), 0)
    for left in (".1-2.bin.77.bin", "notes.txt"):
        (tmp_path / "c" / "0" / left).write_text("left")
    new = opened(tmp_path)
    new.start(ALONE)
    assert new.versions("c", [1]) == [NONE]
    assert files(tmp_path) == ["notes.txt"]


def test_states_stay_on_the_gpu_of_a_single_process(tmp_path, monkeypatch):
    """A checkpoint writes its versions to files. A resumed run reads the same numbers."""
    monkeypatch.setattr("gcfed.federated.state.store.has_room", lambda device: True)
    stores = opened(tmp_path)
    states = []
    stores.start(ALONE)
    for t, there in enumerate(([], ["1-0.bin", "2-0.bin"], ["1-1.bin", "2-0.bin"])):
        stores.write("c", ids(1, 2)[: 2 - t % 2], values(float(t), 10.0 + t), t)
        stores.read("c", ids(1), LIKE)["bias"].fill_(-1)  # reads return copies
        assert stores.read("c", ids(1, 2), LIKE)["bias"][:, 0].tolist() == [t, 10 + t - t % 2]
        assert files(tmp_path) == there
        states.append(stores.state_dict())
        prune(stores)
    assert files(tmp_path) == ["1-2.bin", "2-2.bin"]
    again = resumed(tmp_path, states[2])
    assert again.read("c", ids(1, 2), LIKE)["bias"][:, 0].tolist() == [2, 12]
    again.write("c", ids(1), values(7.0), 3)
    assert again.read("c", ids(1), LIKE)["bias"][0, 0] == 7
    again.release()
    # the last version is in no checkpoint
    with pytest.raises(ValueError, match=r"1-3\.bin is not there"):
        again.read("c", ids(1), LIKE)


# ---------------------------------------------------------------------------- states that stay on a
# GPU
@pytest.fixture
def on_gpu(monkeypatch):
    """States stay on the device, as on a GPU with free memory."""
    monkeypatch.setattr("gcfed.federated.state.store.has_room", lambda device: True)


def test_a_gpu_writes_states_without_a_wait(on_gpu, tmp_path):
    """The host cannot read a tensor on ``meta``."""
    stores = opened(tmp_path)
    new = {name: t.to("meta") for name, t in values(1.0, 2.0).items()}
    counts = torch.ones(2, dtype=torch.bool, device="meta")
    for round_index in (0, 1):
        stores.write("c", ids(1, 2), new, round_index, counts)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        stores.finish_round(ids(1, 2), {1})


def test_a_gpu_keeps_the_old_state_of_a_client_that_does_not_count(on_gpu, tmp_path):
    stores = opened(tmp_path)
    some = torch.tensor([True, False])
    stores.write("c", ids(1, 2), values(1.0, 2.0), 0, some)
    stores.finish_round(ids(1, 2), {0})
    assert stores.versions("c", [1, 2]) == [0, NONE]
    stores.write("c", ids(2), values(3.0), 1)
    stores.write("c", ids(2, 1), values(4.0, 5.0), 2, some)
    assert stores.versions("c", [1, 2]) == [0, 2]
    read = stores.read("c", ids(1, 2), LIKE)
    assert all(torch.equal(read[name][0], values(1.0)[name][0]) for name in LIKE)
    assert all(torch.equal(read[name][1], values(4.0)[name][0]) for name in LIKE)


def test_a_gpu_reads_the_file_of_a_client_that_does_not_count(on_gpu, tmp_path):
    stores = opened(tmp_path)
    stores.write("c", ids(1), values(1.0), 0)
    stores = resumed(tmp_path, stores.state_dict())
    stores.write("c", ids(1), values(float("nan")), 1, torch.tensor([False]))
    state = stores.state_dict()
    assert stores.versions("c", [1]) == [0]
    assert resumed(tmp_path, state).read("c", ids(1), LIKE)["bias"].isfinite().all()
    assert stores.read("c", ids(1), LIKE)["bias"].isfinite().all()


class Allocations(TorchDispatchMode):
    """Notes the size in bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.nbytes)
        return out


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_no_second_copy_of_a_state_is_in_memory(tmp_path, layout):
    """A state is written and read tensor by tensor."""
    draw = torch.rand(3, 64, 64, 8, 8).to(memory_format=torch.channels_last_3d)
    first = {n: draw[row].contiguous(memory_format=layout) for row, n in enumerate("abc")}
    size_of_one = first["a"].nbytes
    stores = opened(tmp_path)
    state = {name: t.unsqueeze(0) for name, t in first.items()}
    tracemalloc.start()
    with Allocations() as made:
        stores.write("c", ids(4), state, 0)
        read = stores.read("c", ids(4), first)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made.largest <= size_of_one
    assert peak < size_of_one / 2  # of what Python and NumPy allocate
    for name, t in first.items():
        assert torch.equal(read[name][0], t)


def test_states_of_several_sizes_and_types_follow_each_other():
    """Earlier results keep their numbers."""
    stores = ClientStores()
    stores.names = {"large", "small"}
    large = {
        "w": torch.arange(12.0).view(2, 2, 3),
        "b": torch.ones(2, 2, dtype=torch.float64),
        "none": torch.zeros(2, 0),
    }
    small = {"n": torch.tensor([[7], [8]])}
    clients = np.array([0, 1])
    found = []
    for round_index in (0, 1):
        stores.write("large", clients, large, round_index)
        stores.write("small", clients, small, round_index)
        found.append(stores.read("large", clients, {name: t[0] for name, t in large.items()}))
        found.append(stores.read("small", clients, {name: t[0] for name, t in small.items()}))
    for states, expected in zip(found, [large, small] * 2, strict=True):
        for name, t in expected.items():
            assert torch.equal(states[name], t)
            assert states[name].dtype == t.dtype


def test_the_format_of_a_file_is_the_numbers_in_order_and_a_checksum(tmp_path):
    stores = opened(tmp_path)
    stores.write("c", ids(7), values(1.0), 3)
    content = b"".join(t[0].contiguous().numpy().tobytes() for t in values(1.0).values())
    checksum = zlib.crc32(content, zlib.crc32(repr(("c", 7, 3)).encode()))
    file = tmp_path / "c" / "0" / "7-3.bin"
    assert file.read_bytes() == content + checksum.to_bytes(4, "little")
