"""Per-client state that survives rounds (control variates, previous models), in files.

A client's state is one vector, and each version of it a file ``<client>-<round>.bin``, mapped when it is read. The
system keeps the files in memory as far as they fit, and the processes of a run share them. On a GPU that a run has for
itself, states stay there while they fit, and become files when a checkpoint is due. A checkpoint holds only an index
(client → round and checksum of its version), for which it waits until the files are on the disk; a run that resumes
takes each client's version of that checkpoint's round. The files of the last two checkpoints are kept.
"""

import os
import re
import secrets
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from gcfed.federated.stack import Params, broadcast_like, per_client
from gcfed.utils.checked import checked
from gcfed.utils.files import replacing, scratch

# What a store writes: <client>-<round>.bin, and the temporary name of one that was killed while it wrote.
_VERSION = re.compile(r"\d+-\d+\.bin|\.\d+-\d+\.bin\.\d+\.bin")


class ClientStore:
    """One named piece of state of every client; ``ClientStores.open`` makes it.

    Args:
        folder: where the files lie.
        dtype: of what is stored; None: that of the model.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        self.folder, self.dtype = folder, dtype
        self.shared = False  # with other processes, which read files
        self.forgets = False  # nothing that is written stays
        self._held: dict[int, Tensor] = {}  # the present versions that lie on a GPU, ``[P]``
        self._version: dict[int, int] = {}
        self._checkpointed: dict[int, int] = {}
        self._checksum: dict[int, int] = {}  # of the checkpointed versions
        self._replaced: list[Path] = []  # since the last checkpoint, which needs them
        self._previous: list[Path] = []  # the checkpoint before needs them, the last does not

    def __contains__(self, client: int) -> bool:
        return int(client) in self._version

    def version(self, client: int) -> int | None:
        """Index of the round in which this client's state was last written; None where it has none."""
        return self._version.get(int(client))

    def read(self, clients: np.ndarray, like: Mapping[str, Tensor], *, default: Params | None = None) -> Params:
        """The states of these clients, name → ``[K, *shape]``, on the device and in the layout of ``like``.

        Args:
            clients: ids, ``[K]``.
            like: names, shapes, types, devices and memory formats of one client's state.
            default: the state of a client that has none yet; None: zeros.
        """
        out = {name: broadcast_like(t, len(clients)) for name, t in like.items()}
        for row, client in enumerate(clients.tolist()):
            vector = self._vector(client, sum(t.numel() for t in like.values()), like)
            offset = 0
            for name, t in like.items():
                if vector is None:
                    out[name][row].zero_() if default is None else out[name][row].copy_(default[name])
                else:
                    out[name][row].copy_(vector[offset : offset + t.numel()].view(t.shape), non_blocking=True)
                offset += t.numel()
        return out

    def rounded(self, values: Params) -> Params:
        """What a later :meth:`read` will return of these values: a server that adds up changes must add up these."""
        return values if self.dtype is None else {n: v.to(self.dtype).to(v.dtype) for n, v in values.items()}

    def write(
        self, clients: np.ndarray, values: Mapping[str, Tensor], round: int, counts: Tensor | None = None
    ) -> None:
        """Replaces the states of these clients, name → ``[K, *shape]``, in the round of this index: of those that
        count, bool ``[K]``; None: of all.
        """
        if self.forgets:
            return
        rows = np.arange(len(clients)) if counts is None else np.flatnonzero(counts.cpu().numpy())
        dtype = self.dtype or next(iter(values.values())).dtype
        for row, client in zip(rows, clients[rows].tolist(), strict=True):
            vector = torch.cat([v[row].detach().reshape(-1) for v in values.values()]).to(dtype)
            if client in self._held:
                self._held[client].copy_(vector)  # given back, its stream could reuse memory that another still reads
            elif not self.shared and _fits(vector.device):
                self._held[client] = vector
            else:
                self._save(client, round, vector)
        self.mark_written(clients[rows], round)

    def move(
        self, clients: np.ndarray, held: Mapping[str, Tensor], change: Mapping[str, Tensor], counts: Tensor, round: int
    ) -> None:
        """Adds a change to states that were read, in place, and writes them; a client that does not count, bool
        ``[K]``, keeps what it had.
        """
        for name, own in held.items():
            own.add_(torch.where(per_client(counts, own), change[name], 0.0))
        self.write(clients, held, round)

    def _save(self, client: int, version: int, vector: Tensor) -> None:
        with replacing(self._path(client, version)) as temporary:
            temporary.write_bytes(vector.cpu().view(torch.uint8).numpy().data)

    def mark_written(self, clients: np.ndarray, round: int) -> None:
        """Notes that these clients have a version of this round, also those that another process wrote."""
        for client in clients.tolist():
            before = self._version.get(client)
            if before is not None and before != round:
                path = self._path(client, before)
                if self._checkpointed.get(client) == before:
                    self._replaced.append(path)
                else:
                    path.unlink(missing_ok=True)
            self._version[client] = round

    # ----------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """The index, once the files that changed since the last checkpoint are on the disk."""
        for client, version in self._version.items():
            if self._checkpointed.get(client) != version:
                if client in self._held:
                    self._save(client, version, self._held[client])
                with self._path(client, version).open("rb") as file:
                    os.fsync(file.fileno())
                    self._checksum[client] = zlib.crc32(file.read())
        clients = sorted(self._version)
        return {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "rounds": torch.tensor([self._version[c] for c in clients], dtype=torch.int64),
            "checksums": torch.tensor([self._checksum[c] for c in clients], dtype=torch.int64),
            "previous": [path.name for path in self._replaced],  # what the checkpoint before this one needs, beside it
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the versions of a checkpoint.

        Raises:
            ValueError: it names a file that no store writes, which would be deleted later.
        """
        if strange := [name for name in state_dict["previous"] if not _VERSION.fullmatch(str(name))]:
            raise ValueError(f"the checkpoint names {strange[0]!r} as the state of a client, which no store writes.")
        clients, rounds, checksums = (state_dict[key].tolist() for key in ("clients", "rounds", "checksums"))
        self._version = dict(zip(clients, rounds, strict=True))
        self._checkpointed, self._checksum = dict(self._version), dict(zip(clients, checksums, strict=True))
        self._previous = [self.folder / name for name in state_dict["previous"]]
        self._held.clear()

    def check(self) -> None:
        """Reads every client's file once.

        Raises:
            ValueError: one is gone or is not what the checkpoint refers to; names it.
        """
        for client, version in self._version.items():
            path = self._path(client, version)
            if not path.is_file() or zlib.crc32(path.read_bytes()) != self._checksum[client]:
                raise ValueError(
                    f"{path} is {'damaged' if path.is_file() else 'not there'}: the checkpoint refers to this client's "
                    "state. Put it back (states lie in the run's own folder or, with client_store.folder, in one named "
                    "by where the run lies), resume from previous.ckpt, or start anew without ckpt_path."
                )

    def clear(self) -> None:
        """Deletes the versions that neither the loaded checkpoint nor the one before it needs."""
        needed = {self._path(*item) for item in self._version.items()} | set(self._previous)
        for path in self.folder.glob("*"):
            if path not in needed and _VERSION.fullmatch(path.name):
                path.unlink()

    def rotate(self) -> list[Path]:
        """Begins a new checkpoint; the files that neither the one just made nor the one before refers to."""
        obsolete, self._previous, self._replaced = self._previous, self._replaced, []
        self._checkpointed = dict(self._version)
        return obsolete

    def release(self) -> None:
        """Gives back the memory of a GPU: only what the last checkpoint has is left."""
        if self._held:
            self._version = dict(self._checkpointed)
            self._held.clear()

    def _path(self, client: int, version: int) -> Path:
        return self.folder / f"{client}-{version}.bin"

    def _vector(self, client: int, size: int, like: Mapping[str, Tensor]) -> Tensor | None:
        if (version := self._version.get(client)) is None or client in self._held:
            return self._held.get(client)
        dtype = self.dtype or next(iter(like.values())).dtype
        return torch.from_file(str(self._path(client, version)), size=size, dtype=dtype)  # a memory map


@checked
class ClientStores:
    """Makes the stores of a run's methods and carries them through checkpoints.

    Args:
        dtype: of what is stored: null (that of the model) or ``bfloat16`` (half the size of float32).
        folder: where files go; None: a temporary one, without checkpoints.
    """

    def __init__(self, dtype: Literal["bfloat16"] | None = None, folder: str | Path | None = None) -> None:
        self.dtype = None if dtype is None else torch.bfloat16
        self.folder = None if folder is None else Path(folder)
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._stores: dict[str, ClientStore] = {}
        self._loaded: dict[str, Any] | None = None

    def open(self, name: str) -> ClientStore:
        """The store of this name; the same one each time."""
        if name not in self._stores:
            if self.folder is None and self._temporary is None:
                self._temporary = scratch()
            folder = self.folder or Path(self._temporary.name)  # type: ignore[union-attr]
            self._stores[name] = ClientStore(folder / name, dtype=self.dtype)
        return self._stores[name]

    def start(self, world_size: int, *, first: bool = True) -> None:
        """Called once before the first round, on every process: takes up a loaded checkpoint.

        The ``first`` process also checks the files, and deletes those that an earlier run, or a kill, has left.

        Raises:
            ValueError: several processes without a folder; a client's state that is damaged or gone.
        """
        if world_size > 1:
            self.require_folder()
        for name, store in self._stores.items():
            store.shared = world_size > 1
            if self._loaded is not None and name in self._loaded:
                store.load_state_dict(self._loaded[name])
            if first:
                store.check()
                store.clear()
        self._loaded = None

    def require_folder(self) -> None:
        """Refuses, before the first round, a run whose checkpoints or other processes could not find its states.

        Raises:
            ValueError: a method keeps states and there is no folder for them.
        """
        if self._stores and self.folder is None:
            raise ValueError("client_store.folder=null: checkpoints refer to clients' states there; name a folder.")

    def require_common_disk(self, strategy: Strategy) -> None:
        """Refuses, before the first round, nodes of which one does not see what another writes for it.

        Raises:
            ValueError: a method keeps states, and their folder is not the same everywhere.
        """
        if not self._stores or self.folder is None:
            return
        mark = self.folder / strategy.broadcast(f".seen-{secrets.token_hex(8)}")
        if strategy.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        strategy.barrier()
        common = strategy.reduce_boolean_decision(mark.is_file())
        if strategy.is_global_zero:
            mark.unlink()
        if not common:
            raise ValueError(
                f"client_store.folder={self.folder} is not the same folder on all nodes: a client that trains on "
                "another node than before would not find its state. Name one on a disk that all of them see."
            )

    def finish_round(self, cohort: np.ndarray, round: int) -> None:
        """Every process notes what the others have written for this round's cohort."""
        for store in self._stores.values():
            there = [client for client in cohort.tolist() if store._path(client, round).is_file()]
            store.mark_written(np.array(there, dtype=np.int64), round)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Whatever clients do in here, they keep what they had."""
        try:
            for store in self._stores.values():
                store.forgets = True
            yield
        finally:
            for store in self._stores.values():
                store.forgets = False

    def release(self) -> None:
        for store in self._stores.values():
            store.release()

    def rotate(self) -> list[Path]:
        return [path for store in self._stores.values() for path in store.rotate()]

    def bytes_of(self, num_clients: int, model_bytes: int) -> int:
        """What the states of all clients would take; 0 where no method keeps any."""
        return len(self._stores) * num_clients * model_bytes // (2 if self.dtype is torch.bfloat16 else 1)

    def state_dict(self) -> dict[str, Any]:
        self.require_folder()
        return {name: store.state_dict() for name, store in self._stores.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


def _fits(device: torch.device) -> bool:
    """Whether states may lie on this device: on a GPU of whose memory a quarter is free."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return 4 * free > total
