"""Per-client state that survives rounds (control variates, previous models), in files.

A client's state is one vector, and each version of it a file ``<client>-<round>.bin``. The file ends in a checksum of
its store, client, round and content, which every read compares. The system keeps the files in memory as far as they
fit, and the processes of a run share them. On a GPU that a run has for itself, states stay there while they fit, and
become files when a checkpoint is due. A checkpoint holds only an index, client → round, and waits until the files are
on the disk. The versions of the last two checkpoints are kept.
"""

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.training.stack import Params, broadcast_like
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
        self._last: dict[int, int] = {}  # the versions of the last checkpoint
        self._before: dict[int, int] = {}  # and of the one before it

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
                content = self._load(client)
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
        if before not in (round, self._last.get(client)):
            self.path(client, before).unlink(missing_ok=True)
        self._version[client] = round

    # ----------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """The index, once the files that changed since the last checkpoint are on the disk."""
        self._settle()
        clients = sorted(self._version)
        rounds = [[versions.get(client, -1) for client in clients] for versions in (self._version, self._last)]
        return {"clients": torch.tensor(clients), "rounds": torch.tensor(rounds)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the versions of a checkpoint."""
        clients, (rounds, before) = state_dict["clients"].tolist(), state_dict["rounds"].tolist()
        self.take(dict(zip(clients, rounds, strict=True)))
        self._before = {client: round for client, round in zip(clients, before, strict=True) if round >= 0}
        self._held.clear()

    def take(self, versions: Mapping[int, int]) -> None:
        """Takes up these versions, by client, of a checkpoint or of the process that counts them and deletes files."""
        self._version, self._last = {**versions}, {**versions}

    def check(self) -> None:
        """Reads all clients' files once; raises ValueError if one is gone or damaged, and names it."""
        for client in self._version:
            self._load(client)

    def clear(self) -> None:
        """Deletes the versions that neither the loaded checkpoint nor the one before it needs."""
        needed = {self.path(*item) for versions in (self._version, self._before) for item in versions.items()}
        for path in self.folder.glob("*"):
            if path not in needed and _VERSION.fullmatch(path.name):
                path.unlink()

    def rotate(self) -> list[Path]:
        """Begins a new checkpoint; the files that neither the one just made nor the one before refers to."""
        obsolete = [self.path(c, version) for c, version in self._before.items() if self._last.get(c) != version]
        self._before, self._last = self._last, dict(self._version)
        return obsolete

    def release(self) -> None:
        """Gives back the memory of a GPU: only what the last checkpoint has is left."""
        if self._held:
            self._version = dict(self._last)
            self._held.clear()

    def _settle(self) -> None:
        """Waits until what clients wrote since the last checkpoint is on the disk."""
        for client, version in self._version.items():
            if self._last.get(client) != version:
                if client in self._held:
                    self._save(client, version, self._held[client])
                with self.path(client, version).open("rb") as file:
                    os.fsync(file.fileno())

    def _save(self, client: int, version: int, vector: Tensor) -> None:
        content = vector.cpu().view(torch.uint8).numpy()
        with replacing(self.path(client, version)) as temporary:
            end = self._sum(client, version, content).to_bytes(_SUM, "little")
            temporary.write_bytes(b"".join([content.data, end]))

    def _load(self, client: int) -> np.ndarray:
        """The bytes of a client's present version.

        Raises:
            ValueError: the file is gone, cut or another one; names it.
        """
        version = self._version[client]
        try:
            content, end = np.split(np.fromfile(self.path(client, version), np.uint8), [-_SUM])
        except FileNotFoundError:
            raise self._lost(client, "not there") from None
        if len(end) < _SUM or int.from_bytes(end.tobytes(), "little") != self._sum(client, version, content):
            raise self._lost(client, "damaged")
        return content

    def _sum(self, client: int, version: int, content: np.ndarray) -> int:
        return zlib.crc32(content.data, zlib.crc32(f"{self.folder.name}/{client}-{version}".encode()))

    def _lost(self, client: int, how: str) -> ValueError:
        return ValueError(
            f"{self.path(client, self._version[client])} is {how}: it is a client's state, which the run needs. Put it "
            "back (it lies in the run's own folder or, with client_store.folder, in one named by where the run lies), "
            "resume from previous.ckpt, or start anew without ckpt_path."
        )


def as_stored(values: Params, dtype: torch.dtype | None) -> Params:
    """Values as a store of this ``dtype`` returns them later; None: unchanged."""
    return values if dtype is None else {n: v.to(dtype).to(v.dtype) for n, v in values.items()}


def _fits(device: torch.device) -> bool:
    """Whether states may lie on this device: on a GPU of whose memory a quarter is free."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return 4 * free > total
