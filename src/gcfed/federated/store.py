"""Per-client state that survives rounds (control variates, previous models), in memory or on disk.

A client's state is one vector, made when the client is first written to, and one file ``<client>-<round>.bin`` for
each version that a checkpoint refers to. A checkpoint therefore holds only an index (client → round of its version) and
rewrites nothing that did not change; a run that resumes takes each client's version of that checkpoint's round.
"""

import os
import re
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

KINDS = ("memory", "disk")
# What a store writes: <client>-<round>.bin, and the temporary name of one that was killed while it wrote.
_VERSION = re.compile(r"\d+-\d+\.bin|\.\d+-\d+\.bin\.\d+\.bin")
DTYPES = {None: None, "bfloat16": torch.bfloat16, "float32": torch.float32}


class ClientStore:
    """One named piece of state of every client; ``ClientStores.open`` makes it.

    Args:
        folder: where versions lie; None keeps everything in memory, and such a store cannot be checkpointed.
        in_memory: hold the current versions in memory and write files for checkpoints only; else files are the store.
        write_through: write files at once although ``in_memory``, for the other processes to read.
        dtype: of what is stored; None: that of the model.
    """

    def __init__(
        self, folder: Path | None, *, in_memory: bool = True, write_through: bool = False, dtype: Any = None
    ) -> None:
        self.folder, self.in_memory, self.dtype = folder, in_memory, dtype
        self.write_through = write_through or not in_memory
        self._version: dict[int, int] = {}
        self._memory: dict[int, tuple[int, Tensor]] = {}
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
            if self.in_memory:
                self._memory[client] = (round.index, vector)
            if self.write_through:
                self._save(client, round.index, vector)
        self.mark_written(clients, round)

    def mark_written(self, clients: np.ndarray, round: Round) -> None:
        """Notes that these clients have a version of this round, also those that another process wrote."""
        for client in clients.tolist():
            before = self._version.get(client)
            if before is not None and before != round.index and self.write_through:
                path = self._path(client, before)
                if self._checkpointed.get(client) == before:
                    self._stale.append(path)  # the last checkpoint still needs it
                else:
                    path.unlink(missing_ok=True)
            self._version[client] = round.index
            if client in self._memory and self._memory[client][0] != round.index:
                del self._memory[client]  # another process has a newer one

    # ----------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Tensor]:
        """The index; what changed since the last call is written to files first."""
        if self._version and self.folder is None:
            raise ValueError("this client store has no folder, so its run cannot be checkpointed.")
        for client, version in self._version.items():
            if not self.write_through and self._checkpointed.get(client) != version:
                self._save(client, version, self._memory[client][1])
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
        self._checkpointed, self._memory = dict(self._version), {}
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
        if not self.write_through:
            for client, version in self._checkpointed.items():
                if self._version.get(client) != version:
                    self._path(client, version).unlink(missing_ok=True)
        self._stale, self._checkpointed = [], dict(self._version)

    # ----------------------------------------------------------------------------------------------------- files
    def _path(self, client: int, version: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}-{version}.bin"

    def _save(self, client: int, version: int, vector: Tensor) -> None:
        with replacing(self._path(client, version)) as temporary, temporary.open("wb") as file:
            vector.view(torch.uint8).numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())  # as the checkpoint that will refer to it

    def _vector(self, client: int, size: int, like: Mapping[str, Tensor]) -> Tensor | None:
        version = self._version.get(client)
        if version is None:
            return None
        held = self._memory.get(client)
        if held is not None and held[0] == version:
            return held[1]
        dtype = self.dtype or next(iter(like.values())).dtype
        vector = torch.from_file(str(self._path(client, version)), size=size, dtype=dtype)  # a memory map
        if self.in_memory:
            vector = vector.clone()
            self._memory[client] = (version, vector)
        return vector


class ClientStores:
    """Makes the stores of a run's methods and carries them through checkpoints.

    Args:
        kind: ``memory`` holds every touched client in memory; ``disk`` holds none, and maps one file per client.
        dtype: of what is stored: null (that of the model), ``bfloat16`` (half the size) or ``float32``.
        folder: where files go; None: memory only, without checkpoints.

    Raises:
        ValueError: unknown kind or dtype, or ``disk`` without a folder.
    """

    def __init__(self, kind: str = "memory", dtype: str | None = None, folder: str | Path | None = None) -> None:
        choice("client_store.kind", kind, KINDS)
        choice("client_store.dtype", dtype, DTYPES)
        if kind == "disk" and folder is None:
            raise ValueError("client_store.kind=disk needs client_store.folder.")
        self.kind, self.dtype = kind, DTYPES[dtype]
        self.folder = None if folder is None else Path(folder)
        self._stores: dict[str, ClientStore] = {}
        self._loaded: dict[str, Any] | None = None

    def open(self, name: str) -> ClientStore:
        """The store of this name; the same one each time."""
        if name not in self._stores:
            self._stores[name] = ClientStore(
                None if self.folder is None else self.folder / name, in_memory=self.kind == "memory", dtype=self.dtype
            )
        return self._stores[name]

    def clear(self) -> None:
        """Deletes the versions that an earlier run, or a kill, left in the stores' folders, but for those that this run
        continues from; for one process to call, before :meth:`start`.
        """
        for name, store in self._stores.items():
            state = (self._loaded or {}).get(name, {"clients": torch.zeros(0), "rounds": torch.zeros(0)})
            index = zip(state["clients"].tolist(), state["rounds"].tolist(), strict=True)
            needed = {f"{client}-{version}.bin" for client, version in index}
            for path in store.folder.glob("*") if store.folder is not None else ():
                if path.name not in needed and _VERSION.fullmatch(path.name):
                    path.unlink()

    def start(self, world_size: int) -> None:
        """Called once before the first round, on every process: takes up a loaded checkpoint.

        With several processes every write goes to disk, where the process that trains the client next can read it.

        Raises:
            ValueError: several processes without a folder.
        """
        for name, store in self._stores.items():
            if world_size > 1:
                if store.folder is None:
                    raise ValueError("several processes share client states through client_store.folder: set it.")
                store.write_through = True
            if self._loaded is not None and name in self._loaded:
                store.load_state_dict(self._loaded[name])
        self._loaded = None

    def require_folder(self) -> None:
        """Refuses, before the first round, a run whose checkpoints could not refer to its states.

        Raises:
            ValueError: a method keeps states and there is no folder for them.
        """
        if self._stores and self.folder is None:
            raise ValueError("client_store.folder=null: checkpoints refer to clients' states there; name a folder.")

    def finish_round(self, round: Round) -> None:
        """Every process notes what the others have written for this round's cohort."""
        for store in self._stores.values():
            if store.write_through and store.folder is not None:
                there = [c for c in round.cohort.tolist() if store._path(c, round.index).is_file()]
                store.mark_written(np.array(there, dtype=np.int64), round)

    def prune(self) -> None:
        for store in self._stores.values():
            store.prune()

    def bytes_of(self, num_clients: int, model_bytes: int) -> int:
        """What the states of all clients would take; 0 where no method keeps any."""
        return len(self._stores) * num_clients * model_bytes // (2 if self.dtype is torch.bfloat16 else 1)

    def state_dict(self) -> dict[str, Any]:
        return {name: store.state_dict() for name, store in self._stores.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
