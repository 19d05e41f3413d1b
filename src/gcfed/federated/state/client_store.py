"""Per-client state that survives rounds (control variates, previous models), in files.

A client's state is one vector. Each version of it is a file ``<client>-<round>.bin``, a thousand clients in a folder.
It ends in a checksum of its store, client, round and content, which every read compares. The processes of a run share
the files, and the system caches them in memory. A run with one process and a GPU keeps states on the GPU while they
fit, and writes files only for checkpoints. A checkpoint contains an index, client → round, and waits until the files
are on the disk. A client has up to two versions: the present one, and that of the last checkpoint.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.training.stack import Params, broadcast_like
from gcfed.utils.device import free_memory
from gcfed.utils.files import replacing

_SUM = 4  # bytes of the checksum


class ClientStore:
    """The states of all clients under one name. ``ClientStores.open`` makes it.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = False  # whether other processes read its files
        self.servers = False  # whether it is a table of the server, which clients do not write
        self._held: dict[int, Tensor] = {}  # the present versions on a GPU, ``[P]``
        self._version: dict[int, int] = {}  # the present versions
        self._last: dict[int, int] = {}  # the versions of the last checkpoint

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client // 1000:d}" / f"{client:d}-{version:d}.bin"

    def version(self, client: int) -> int | None:
        """Index of the round in which this client's state was last written; None if it has none."""
        return self._version.get(int(client))

    def read(self, clients: np.ndarray, like: Mapping[str, Tensor], *, default: Params | None = None) -> Params:
        """The states of these clients, ``[K]``: name → ``[K, *shape]``, on the device and in the layout of ``like``,
        name → ``[*shape]``. A client without a state has ``default``, or zeros.

        Raises:
            ValueError: a client's file is lost, damaged, or of another model; names it.
        """
        out = {name: broadcast_like(t, len(clients)) for name, t in like.items()}
        sizes = [t.numel() for t in like.values()]
        dtype = next(iter(like.values())).dtype
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
        """Replaces the states of these clients, name → ``[K, *shape]``, in the round of this index.

        ``counts``, bool ``[K]``, selects clients; None selects all.
        """
        rows = np.arange(len(clients)) if counts is None else np.flatnonzero(counts.cpu().numpy())
        dtype = next(iter(values.values())).dtype
        for row, client in zip(rows, clients[rows].tolist(), strict=True):
            vector = torch.cat([v[row].detach().reshape(-1) for v in values.values()]).to(dtype)
            if client in self._held:
                self._held[client].copy_(vector)  # a new tensor could reuse memory that another stream still reads
            elif not self.shared and _fits(vector.device):
                self._held[client] = vector
            else:
                self._save(client, round, vector)
            self.mark_written(client, round)

    def mark_written(self, client: int, round: int) -> None:
        """Notes that a client has a version of this round, which this or another process wrote."""
        before = self._version.get(client, round)
        if before not in (round, self._last.get(client)):
            self.path(client, before).unlink(missing_ok=True)
        self._version[client] = round

    # ----------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """The index. Waits until the files that changed since the last checkpoint are on the disk."""
        self._settle()
        return {"clients": torch.tensor([*self._version]), "rounds": torch.tensor([*self._version.values()])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes back to the versions of a checkpoint."""
        self.take(dict(zip(state_dict["clients"].tolist(), state_dict["rounds"].tolist(), strict=True)))
        self._held.clear()

    def take(self, versions: Mapping[int, int]) -> None:
        """Goes back to these versions, client → round, of a checkpoint or of the server."""
        self._version, self._last = {**versions}, {**versions}

    def check(self) -> None:
        """Raises ValueError if the file of a client is lost, and names it. Damage is found when it is read."""
        for client, version in self._version.items():
            if not self.path(client, version).is_file():
                raise self._lost(client, "not there")

    def clear(self) -> None:
        """Deletes all versions that the loaded checkpoint does not need."""
        needed = {self.path(*item) for item in self._version.items()}
        for path in self.folder.glob("*/*.bin"):  # also temporary files that a killed process has left
            if path not in needed:
                path.unlink()

    def rotate(self) -> list[Path]:
        """Called after each checkpoint. Returns the files that the one before needed and this one does not."""
        obsolete = [self.path(c, version) for c, version in self._last.items() if self._version.get(c) != version]
        self._last = dict(self._version)
        return obsolete

    def release(self) -> None:
        """Frees the memory of a GPU. What no checkpoint contains is lost."""
        if self._held:
            self._version = dict(self._last)
            self._held.clear()

    def _settle(self) -> None:
        """Waits until all that was written since the last checkpoint is on the disk."""
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
        """The bytes of a client's present version, without the checksum."""
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
            f"{self.path(client, self._version[client])} is {how}: it is a client's state, which the run needs. "
            "Restore it, or start anew without ckpt_path. (A folder below client_store.folder belongs to a run's path.)"
        )


def _fits(device: torch.device) -> bool:
    """Whether the device is a GPU with a quarter of its memory free."""
    return device.type == "cuda" and 4 * free_memory(device) > torch.cuda.mem_get_info(device)[1]
