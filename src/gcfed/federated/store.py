"""Per-client state that survives rounds (control variates, previous models), in files.

A client's state is one vector, and each version of it a file ``<client>-<round>.bin``, mapped when it is read. The
system keeps the files in memory as far as they fit, and the processes of a run share them. A checkpoint holds only an
index (client → round of its version), for which it waits until the files are on the disk; a run that resumes takes each
client's version of that checkpoint's round.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.round import Round
from gcfed.federated.stack import Params, broadcast_like
from gcfed.utils.files import replacing
from gcfed.utils.number import choice

# What a store writes: <client>-<round>.bin, and the temporary name of one that was killed while it wrote.
_VERSION = re.compile(r"\d+-\d+\.bin|\.\d+-\d+\.bin\.\d+\.bin")
DTYPES = {None: None, "bfloat16": torch.bfloat16, "float32": torch.float32}


class ClientStore:
    """One named piece of state of every client; ``ClientStores.open`` makes it.

    Args:
        folder: where the files lie.
        dtype: of what is stored; None: that of the model.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        self.folder, self.dtype = folder, dtype
        self._version: dict[int, int] = {}
        self._checkpointed: dict[int, int] = {}
        self._stale: list[Path] = []
        self._bytes = 0

    def __contains__(self, client: int) -> bool:
        return int(client) in self._version

    def __len__(self) -> int:
        """Number of clients that have a state."""
        return len(self._version)

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

    def write(self, clients: np.ndarray, values: Mapping[str, Tensor], round: Round) -> None:
        """Replaces the states of these clients, name → ``[K, *shape]``; a rehearsed round leaves them alone."""
        if round.rehearsal:
            return
        dtype = self.dtype or next(iter(values.values())).dtype
        for row, client in enumerate(clients.tolist()):
            vector = torch.cat([v[row].detach().reshape(-1) for v in values.values()]).to("cpu", dtype)
            self._bytes = vector.nbytes
            with replacing(self._path(client, round.index)) as temporary:
                vector.view(torch.uint8).numpy().tofile(temporary)
        self.mark_written(clients, round)

    def mark_written(self, clients: np.ndarray, round: Round) -> None:
        """Notes that these clients have a version of this round, also those that another process wrote."""
        for client in clients.tolist():
            before = self._version.get(client)
            if before is not None and before != round.index:
                path = self._path(client, before)
                if self._checkpointed.get(client) == before:
                    self._stale.append(path)  # the last checkpoint still needs it
                else:
                    path.unlink(missing_ok=True)
            self._version[client] = round.index

    # ----------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Tensor]:
        """The index, once the files that changed since the last call are on the disk."""
        for client, version in self._version.items():
            if self._checkpointed.get(client) != version:
                with self._path(client, version).open("rb") as file:
                    os.fsync(file.fileno())
        clients = torch.tensor(sorted(self._version), dtype=torch.int64)
        rounds = torch.tensor([self._version[c] for c in clients.tolist()], dtype=torch.int64)
        return {"clients": clients, "rounds": rounds, "bytes": torch.tensor(self._bytes)}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Takes up the versions of a checkpoint.

        Raises:
            FileNotFoundError: a version is gone or cut short: the run went on after this checkpoint was copied.
        """
        index = zip(state_dict["clients"].tolist(), state_dict["rounds"].tolist(), strict=True)
        self._version = dict(index)
        self._checkpointed = dict(self._version)
        self._bytes = int(state_dict["bytes"])
        for client, version in self._version.items():
            path = self._path(client, version)
            if not path.is_file() or path.stat().st_size != self._bytes:
                raise FileNotFoundError(
                    f"{path}: the checkpoint refers to this client's state, which is not there or not whole. "
                    "The states lie beside the checkpoints in the run's folder; resume from that folder's last.ckpt."
                )

    def prune(self) -> None:
        """Deletes the versions that the checkpoint just written no longer refers to."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._stale, self._checkpointed = [], dict(self._version)

    def _path(self, client: int, version: int) -> Path:
        return self.folder / f"{client}-{version}.bin"

    def _vector(self, client: int, size: int, like: Mapping[str, Tensor]) -> Tensor | None:
        if (version := self._version.get(client)) is None:
            return None
        dtype = self.dtype or next(iter(like.values())).dtype
        return torch.from_file(str(self._path(client, version)), size=size, dtype=dtype)  # a memory map


class ClientStores:
    """Makes the stores of a run's methods and carries them through checkpoints.

    Args:
        dtype: of what is stored: null (that of the model), ``bfloat16`` (half the size) or ``float32``.
        folder: where files go; None: a temporary one, without checkpoints.

    Raises:
        ValueError: unknown dtype.
    """

    def __init__(self, dtype: str | None = None, folder: str | Path | None = None) -> None:
        self.dtype = DTYPES[choice("client_store.dtype", dtype, DTYPES)]
        self.folder = None if folder is None else Path(folder)
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._stores: dict[str, ClientStore] = {}
        self._loaded: dict[str, Any] | None = None

    def open(self, name: str) -> ClientStore:
        """The store of this name; the same one each time."""
        if name not in self._stores:
            if self.folder is None and self._temporary is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="gcfed_")
            folder = self.folder or Path(self._temporary.name)  # type: ignore[union-attr]
            self._stores[name] = ClientStore(folder / name, dtype=self.dtype)
        return self._stores[name]

    def clear(self) -> None:
        """Deletes the versions that an earlier run, or a kill, left in the stores' folders, but for those that this run
        continues from; for one process to call, before :meth:`start`.
        """
        for name, store in self._stores.items():
            state = (self._loaded or {}).get(name, {"clients": torch.zeros(0), "rounds": torch.zeros(0)})
            index = zip(state["clients"].tolist(), state["rounds"].tolist(), strict=True)
            needed = {f"{client}-{version}.bin" for client, version in index}
            for path in store.folder.glob("*"):
                if path.name not in needed and _VERSION.fullmatch(path.name):
                    path.unlink()

    def start(self, world_size: int) -> None:
        """Called once before the first round, on every process: takes up a loaded checkpoint.

        Raises:
            ValueError: several processes without a folder.
        """
        if world_size > 1:
            self.require_folder()
        for name, store in self._stores.items():
            if self._loaded is not None and name in self._loaded:
                store.load_state_dict(self._loaded[name])
        self._loaded = None

    def require_folder(self) -> None:
        """Refuses, before the first round, a run whose checkpoints or other processes could not find its states.

        Raises:
            ValueError: a method keeps states and there is no folder for them.
        """
        if self._stores and self.folder is None:
            raise ValueError("client_store.folder=null: checkpoints refer to clients' states there; name a folder.")

    def finish_round(self, round: Round) -> None:
        """Every process notes what the others have written for this round's cohort."""
        for store in self._stores.values():
            there = [c for c in round.cohort.tolist() if store._path(c, round.index).is_file()]
            store.mark_written(np.array(there, dtype=np.int64), round)

    def prune(self) -> None:
        for store in self._stores.values():
            store.prune()

    def bytes_of(self, num_clients: int, model_bytes: int) -> int:
        """What the states of all clients would take; 0 where no method keeps any."""
        return len(self._stores) * num_clients * model_bytes // (2 if self.dtype is torch.bfloat16 else 1)

    def state_dict(self) -> dict[str, Any]:
        self.require_folder()
        return {name: store.state_dict() for name, store in self._stores.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
