"""Per-client state that survives rounds (control variates, previous models), in files.

A client's state is one vector, and each version of it a file ``<client>-<round>.bin``, which ends in a checksum of its
store, client, round and content: none is used unchecked. The system keeps the files in memory as far as they fit, and
the processes of a run share them. On a GPU that a run has for itself, states stay there while they fit, and become
files when a checkpoint is due. A checkpoint holds only an index (client → round and checksum of its version), for which
it waits until the files are on the disk; a run that resumes takes each client's version of that checkpoint's round. The
files of the last two checkpoints are kept.
"""

import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.stack import Params, broadcast_like
from gcfed.utils.files import replacing

# What a store writes: <client>-<round>.bin, and the temporary name of one that was killed while it wrote.
_VERSION = re.compile(r"\d+-\d+\.bin|\.\d+-\d+\.bin\.\d+\.bin")
_SUM = 4  # bytes of a checksum, at the end of a file


class ClientStore:
    """One named piece of state of every client; ``ClientStores.open`` makes it.

    Args:
        folder: where the files lie.
        dtype: of what is stored; None: that of the model.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        self.folder, self.dtype = folder, dtype
        self.shared = False  # with other processes, which read files
        self.servers = False  # a table of the server, which clients do not write
        self._held: dict[int, Tensor] = {}  # the present versions that lie on a GPU, ``[P]``
        self._version: dict[int, int] = {}
        self._checkpointed: dict[int, int] = {}  # the versions of the last checkpoint
        self._checksum: dict[int, int] = {}  # of the checkpointed versions
        self._previous: list[Path] = []  # the checkpoint before needs them, the last does not

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:d}-{version:d}.bin"

    def version(self, client: int) -> int | None:
        """Index of the round in which this client's state was last written; None where it has none."""
        return self._version.get(int(client))

    def read(self, clients: np.ndarray, like: Mapping[str, Tensor], *, default: Params | None = None) -> Params:
        """The states of these clients, ``[K]``: name → ``[K, *shape]``, on the device and in the layout of ``like``,
        name → ``[*shape]``. A client that has none yet has ``default``, or zeros.
        """
        out = {name: broadcast_like(t, len(clients)) for name, t in like.items()}
        sizes = [t.numel() for t in like.values()]
        dtype = self.dtype or next(iter(like.values())).dtype
        for row, client in enumerate(clients.tolist()):
            vector = self._held.get(client)
            if vector is None and client in self._version:
                content, _ = self._load(client)
                if len(content) != sum(sizes) * dtype.itemsize:
                    raise self._lost(client, "of another model")
                vector = torch.from_numpy(content).view(dtype)
            if vector is None:
                for name, t in out.items():
                    t[row] = 0 if default is None else default[name]
                continue
            for (name, t), part in zip(like.items(), vector.split(sizes), strict=True):
                out[name][row].copy_(part.view(t.shape), non_blocking=True)
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
            self.mark_written(client, round)

    def mark_written(self, client: int, round: int) -> None:
        """Notes that a client has a version of this round, also one that another process wrote."""
        before = self._version.get(client, round)
        if before not in (round, self._checkpointed.get(client)):
            self.path(client, before).unlink(missing_ok=True)
        self._version[client] = round

    # ----------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """The index, once the files that changed since the last checkpoint are on the disk."""
        self._settle(self._version)
        clients = sorted(self._version)
        return {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "rounds": torch.tensor([self._version[c] for c in clients], dtype=torch.int64),
            "checksums": torch.tensor([self._checksum[c] for c in clients], dtype=torch.int64),
            "previous": [path.name for path in self._replaced()],  # what the checkpoint before needs beside this one's
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

    def take(self, versions: dict[int, int]) -> None:
        """Takes up these versions, by client, which another process counts; that process alone deletes files."""
        self._version, self._checkpointed, self._checksum = {**versions}, {**versions}, dict.fromkeys(versions, 0)

    def check(self, clients: Iterable[int] | None = None) -> None:
        """Reads these clients' files once, by default all.

        Raises:
            ValueError: one is gone or is not what the checkpoint refers to; names it.
        """
        for client in self._version if clients is None else clients:
            if self._load(client)[1] != self._checksum[client]:
                raise self._lost(client, "not the one of the checkpoint")

    def clear(self) -> None:
        """Deletes the versions that neither the loaded checkpoint nor the one before it needs."""
        needed = {self.path(*item) for item in self._version.items()} | set(self._previous)
        for path in self.folder.glob("*"):
            if path not in needed and _VERSION.fullmatch(path.name):
                path.unlink()

    def rotate(self) -> list[Path]:
        """Begins a new checkpoint; the files that neither the one just made nor the one before refers to."""
        obsolete, self._previous = self._previous, self._replaced()
        self._checkpointed = dict(self._version)
        return obsolete

    def release(self) -> None:
        """Gives back the memory of a GPU: only what the last checkpoint has is left."""
        if self._held:
            self._version = dict(self._checkpointed)
            self._held.clear()

    def _replaced(self) -> list[Path]:
        """What the last checkpoint needs beside the present versions."""
        return [self.path(c, version) for c, version in self._checkpointed.items() if self._version.get(c) != version]

    def _settle(self, clients: Iterable[int]) -> None:
        """Waits until what these clients wrote since the last checkpoint is on the disk, and notes its checksums."""
        for client in clients:
            version = self._version.get(client)
            if version is None or self._checkpointed.get(client) == version:
                continue
            if client in self._held:
                self._save(client, version, self._held[client])
            with self.path(client, version).open("rb") as file:
                os.fsync(file.fileno())
                file.seek(max(0, os.fstat(file.fileno()).st_size - _SUM))
                self._checksum[client] = int.from_bytes(file.read(), "little")

    def _save(self, client: int, version: int, vector: Tensor) -> None:
        content = vector.cpu().view(torch.uint8).numpy()
        with replacing(self.path(client, version)) as temporary:
            end = self._sum(client, version, content).to_bytes(_SUM, "little")
            temporary.write_bytes(b"".join([content.data, end]))

    def _load(self, client: int) -> tuple[np.ndarray, int]:
        """The bytes of a client's present version, and their checksum.

        Raises:
            ValueError: the file is gone, cut or another one; names it.
        """
        version = self._version[client]
        try:
            content, end = np.split(np.fromfile(self.path(client, version), np.uint8), [-_SUM])
        except FileNotFoundError:
            raise self._lost(client, "not there") from None
        checksum = int.from_bytes(end.tobytes(), "little")
        if len(end) < _SUM or checksum != self._sum(client, version, content):
            raise self._lost(client, "damaged")
        return content, checksum

    def _sum(self, client: int, version: int, content: np.ndarray) -> int:
        return zlib.crc32(content.data, zlib.crc32(f"{self.folder.name}/{client}-{version}".encode()))

    def _lost(self, client: int, how: str) -> ValueError:
        return ValueError(
            f"{self.path(client, self._version[client])} is {how}: it is a client's state, which the run needs. Put it "
            "back (it lies in the run's own folder or, with client_store.folder, in one named by where the run lies), "
            "resume from previous.ckpt, or start anew without ckpt_path."
        )


def _fits(device: torch.device) -> bool:
    """Whether states may lie on this device: on a GPU of whose memory a quarter is free."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return 4 * free > total
