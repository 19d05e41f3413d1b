"""What clients keep from one round to the next (control variates, previous models): for methods,
and in files.

A client's state under one name is a vector. Each version of it is a file
``<name>/<thousand>/<client>-<round>.bin``. It ends in a checksum of its name, client, round and
content, which every read compares. The processes of a run share the files, and the system caches
them in memory. A run with one process and a GPU keeps states on the GPU while they fit, and writes
files only for checkpoints. A checkpoint contains the versions, and waits until the files are on the
disk. A state has up to two versions: the present one, and that of the last checkpoint.
"""

import os
import secrets
import zlib
from collections.abc import Mapping, Sequence, Set
from functools import reduce
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from gcfed.federated.network.rows import empty_rows
from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.protocol.messages import Params
from gcfed.utils.checked import checked
from gcfed.utils.device import free_memory
from gcfed.utils.files import replacing
from gcfed.utils.refusal import Refusal

CHECKSUM_BYTES = 4
NONE = -1  # the version of a client that has no state
# The name of the downloads that late clients still have. A round's index is in a client's place.
SENT = "sent"
Key = tuple[str, int]  # the name of a state, and its client


class UndecidedState(NamedTuple):
    """A state on a GPU that was written if ``counts``, bool ``[]``, which the host has not read."""

    key: Key
    round_index: int
    counts: Tensor
    is_new: bool  # it had no version on the GPU


@checked
class ClientStores:
    """The states of all clients, and their part in a run's checkpoints.

    Args:
        folder: folder of the files; None for a temporary one, without checkpoints.

    Attributes:
        names: the names of the states that the run's methods keep.
        shared: whether other processes read the files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._temporary = TemporaryDirectory(prefix="gcfed_") if folder is None else None
        self.names: set[str] = set()
        self.shared = False
        self._gpu_states: dict[Key, Tensor] = {}  # the present versions on a GPU, ``[P]``
        self._undecided_states: list[UndecidedState] = []
        self._versions: dict[Key, int] = {}  # the present versions
        self._saved_versions: dict[Key, int] = {}  # the versions of the last checkpoint

    @property
    def root(self) -> Path:
        return self.folder or Path(self._temporary.name)  # type: ignore[union-attr]

    def path(self, key: Key, version: int) -> Path:
        name, client = key
        return self.root / name / f"{client // 1000:d}" / f"{client:d}-{version:d}.bin"

    def versions(self, name: str, clients: Sequence[int] | np.ndarray) -> list[int]:
        """Index of the round in which each of these clients' states was last
        written, or ``NONE``.
        """
        keys = self._keys(name, clients)
        if any(state.key in keys for state in self._undecided_states):
            self._decide()
        return [self._versions.get(key, NONE) for key in keys]

    def _keys(self, name: str, clients: Sequence[int] | np.ndarray) -> list[Key]:
        if name not in self.names:  # a method reads or writes what is not in its ``keeps``
            raise KeyError(name)
        return [(name, int(client)) for client in clients]

    def read(
        self, name: str, clients: np.ndarray, like: Params, default: Params | None = None
    ) -> Params:
        """The states of these clients, ``[K]``: tensor → ``[K, *shape]``.

        They are on the device and in the layout of ``like``, tensor → ``[*shape]``. A client
        without a state gets ``default``, or zeros.

        Raises:
            Refusal: a client's file is lost, damaged, or of another model. The message names
                the file.
        """
        states = {tensor: empty_rows(t, len(clients)) for tensor, t in like.items()}
        for row, key in enumerate(self._keys(name, clients)):
            state = {tensor: t[row] for tensor, t in states.items()}
            if key in self._gpu_states:
                _copy_vector(self._gpu_states[key], list(state.values()))
            elif key in self._versions:
                self._load_into(list(state.values()), key)
            elif default is None:
                for t in state.values():
                    t.zero_()
            else:
                for tensor, t in state.items():
                    t.copy_(default[tensor])
        return states

    def write(
        self,
        name: str,
        clients: np.ndarray,
        values: Params,
        round_index: int,
        counts: Tensor | None = None,
    ) -> None:
        """Replaces the states of these clients, tensor → ``[K, *shape]``.

        Args:
            round_index: becomes the version.
            counts: selects clients, bool ``[K]``; None selects all. For states that stay on a GPU,
                the host reads it at the end of the round, so that it does not wait for each client.
        """
        for row, key in enumerate(self._keys(name, clients)):
            pieces = [value[row].detach().reshape(-1) for value in values.values()]
            row_counts = None if counts is None else counts[row]
            if self._stays_on_gpu(key, pieces[0].device):
                self._write_on_gpu(key, round_index, torch.cat(pieces), row_counts)
            elif row_counts is None or bool(row_counts):
                if pieces[0].is_cuda:
                    pieces = [torch.cat(pieces)]  # the host then waits once
                self._save(key, round_index, pieces)
                self._mark_written(key, round_index)

    def _stays_on_gpu(self, key: Key, device: torch.device) -> bool:
        return key in self._gpu_states or (not self.shared and _fits(device))

    def _write_on_gpu(
        self, key: Key, round_index: int, vector: Tensor, counts: Tensor | None
    ) -> None:
        """Replaces a state on a GPU if ``counts``, bool ``[]``; None stands for true."""
        is_new = key not in self._gpu_states
        if is_new:
            self._gpu_states[key] = vector
        else:
            # a new tensor could reuse memory that another stream still reads
            held = self._gpu_states[key]
            held.copy_(vector if counts is None else torch.where(counts, vector, held))
        if counts is None:
            self._mark_written(key, round_index)
        else:
            self._undecided_states.append(UndecidedState(key, round_index, counts, is_new))

    def _decide(self) -> None:
        """Finds which of the states that were written on a GPU count. Waits once for all."""
        if not self._undecided_states:
            return
        undecided = self._undecided_states
        self._undecided_states = []
        counts = torch.stack([state.counts for state in undecided]).tolist()
        for state, is_written in zip(undecided, counts, strict=True):
            if is_written:
                self._mark_written(state.key, state.round_index)
            elif state.is_new:
                del self._gpu_states[state.key]

    def finish_round(self, clients: np.ndarray, versions: Set[int]) -> None:
        """Finds on every process the states of these versions that have been written."""
        self._decide()
        for name in self.names - {SENT}:
            for key in self._keys(name, clients):
                for version in sorted(versions):
                    if self.path(key, version).is_file():
                        self._mark_written(key, version)

    # ------------------------------------------------------------------------------------- messages
    def put(self, name: str, index: int, message: bytes) -> None:
        """Keeps a message, which is the same on every process, until it is forgotten."""
        if rank_and_world()[0] == 0:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            self._save((name, index), index, [content])
        self._versions[name, index] = index

    def get(self, name: str, index: int) -> bytes:
        """A message. Raises Refusal if its file is lost or damaged."""
        return self._load((name, index))

    def forget(self, name: str, held: Set[int]) -> None:
        """Deletes the messages that are not ``held``. Those of the last checkpoint stay until there
        is a newer one.
        """
        for key in list(self._versions):
            if key[0] != name or key[1] in held:
                continue
            version = self._versions.pop(key)
            if self._saved_versions.get(key) != version:
                self.path(key, version).unlink(missing_ok=True)

    def _mark_written(self, key: Key, round_index: int) -> None:
        before = self._versions.get(key, round_index)
        if before not in (round_index, self._saved_versions.get(key)):
            self.path(key, before).unlink(missing_ok=True)
        self._versions[key] = round_index

    # ---------------------------------------------------------------------------------- checkpoints
    def require_folder(self) -> None:
        """Raises Refusal if methods keep states and ``folder`` is None, so that checkpoints
        would not find them.
        """
        if self.names and self.folder is None:
            raise Refusal(
                "client_store.folder=null: checkpoints need the clients' states: name a folder."
            )

    def state_dict(self) -> dict[str, Any]:
        """Each name's clients and versions, ``[n, 2]``.

        Waits until all files that changed are on the disk.
        """
        self.require_folder()
        self._decide()
        found: dict[str, list[int]] = {}
        for key, version in self._versions.items():
            if self._saved_versions.get(key) != version:
                self._settle(key, version)
            name, client = key
            found.setdefault(name, []).extend((client, version))
        return {name: torch.tensor(pairs).view(-1, 2) for name, pairs in found.items()}

    def _settle(self, key: Key, version: int) -> None:
        """Waits until a version is on the disk."""
        if key in self._gpu_states:
            self._save(key, version, [self._gpu_states[key]])
        with self.path(key, version).open("rb") as file:
            os.fsync(file.fileno())

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Goes back to the versions of a checkpoint."""
        versions: dict[Key, int] = {}
        for name, pairs in state_dict.items():
            for client, version in pairs.tolist():
                versions[name, client] = version
        self.restore(versions)

    def restore(self, versions: Mapping[Key, int]) -> None:
        """Goes back to these versions, of a checkpoint or of the server."""
        self._versions = dict(versions)
        self._saved_versions = dict(versions)
        self._gpu_states = {}
        self._undecided_states = []

    def check(self, state_dict: Mapping[str, Tensor]) -> None:
        """Goes back to a checkpoint.

        Raises Refusal if one of its files is lost, and names it.
        """
        self.load_state_dict(state_dict)
        for key, version in self._versions.items():
            if not self.path(key, version).is_file():
                raise self._lost(key, "not there")  # damage is found when it is read

    def start(self, trainer: Trainer) -> None:
        """Called once before the first round, on every process.

        Deletes files that the checkpoint does not need.

        Raises:
            Refusal: the processes do not see a common folder.
        """
        self.shared = trainer.world_size > 1
        if self.shared and self.names:
            self._require_common_disk(trainer.strategy)
        if trainer.is_global_zero:
            self._delete_all_but_present()

    def _delete_all_but_present(self) -> None:
        present = {self.path(*item) for item in self._versions.items()}
        for name in self.names:
            files = set((self.root / name).glob("*/*.bin"))  # also temporary ones
            for path in files - present:
                path.unlink()

    def _require_common_disk(self, strategy: Strategy) -> None:
        mark = self.root / f".seen-{secrets.token_hex(8)}"
        if strategy.is_global_zero:
            mark.mkdir(parents=True)
        mark = self.root / strategy.broadcast(mark.name)  # it exists by now
        common = strategy.reduce_boolean_decision(mark.is_dir())
        if strategy.is_global_zero:
            mark.rmdir()
        if not common:
            raise Refusal(
                f"client_store.folder={self.root} is not the same folder in all processes: clients"
                " would lose their states. Name one on a disk that all nodes see, and one run"
                " folder (hydra.run.dir, folder=)."
            )

    def rotate(self) -> list[Path]:
        """Called after each checkpoint.

        Returns the files that only the checkpoint before it needed.
        """
        obsolete = [
            self.path(*item) for item in self._saved_versions.items() - self._versions.items()
        ]
        self._saved_versions = dict(self._versions)
        return obsolete

    def release(self) -> None:
        """Frees the memory of a GPU. States that are in no checkpoint are lost."""
        self._decide()
        self._gpu_states.clear()

    # ---------------------------------------------------------------------------------------- files
    def _save(self, key: Key, version: int, pieces: Sequence[Tensor]) -> None:
        """Writes the pieces of a state, ``[P]`` each, one after the other: a state may be as large
        as a model, so there is no copy of the whole.
        """
        dtype = _common_type(pieces)
        checksum = _first_checksum(key, version)
        with replacing(self.path(key, version)) as temporary, temporary.open("wb") as file:
            for piece in pieces:
                content = _memory(piece.to("cpu", dtype))
                checksum = zlib.crc32(content, checksum)
                file.write(content)
            file.write(_checksum_bytes(checksum))

    def _load_into(self, tensors: Sequence[Tensor], key: Key) -> None:
        """Reads a present version into these tensors, ``[*shape]``, one after the other."""
        dtype = _common_type(tensors)
        version = self._versions[key]
        checksum = _first_checksum(key, version)
        with self._open(key, version) as file:
            size = sum(t.numel() for t in tensors) * dtype.itemsize
            if os.fstat(file.fileno()).st_size != size + CHECKSUM_BYTES:
                self._load(key)  # raises if it is damaged
                raise self._lost(key, "of another model")
            for t in tensors:
                fits = not t.is_cuda and t.dtype == dtype and t.is_contiguous()
                piece = t if fits else torch.empty(t.shape, dtype=dtype)
                content = _memory(piece)
                file.readinto(content)
                checksum = zlib.crc32(content, checksum)
                if piece is not t:
                    t.copy_(piece, non_blocking=True)
            if file.read() != _checksum_bytes(checksum):
                raise self._lost(key, "damaged")

    def _load(self, key: Key) -> bytes:
        """The bytes of a present version, without the checksum."""
        version = self._versions[key]
        with self._open(key, version) as file:
            entries = file.read()
        content = entries[:-CHECKSUM_BYTES]
        checksum = zlib.crc32(content, _first_checksum(key, version))
        if entries[-CHECKSUM_BYTES:] != _checksum_bytes(checksum):
            raise self._lost(key, "damaged")
        return content

    def _open(self, key: Key, version: int) -> BufferedReader:
        try:
            return self.path(key, version).open("rb")
        except FileNotFoundError:
            raise self._lost(key, "not there") from None

    def _lost(self, key: Key, how: str) -> Refusal:
        what = "what a late client was sent" if key[0] == SENT else "a client's state"
        return Refusal(
            f"{self.path(key, self._versions[key])} is {how}: it is {what}, which the run needs."
            " Restore the file, or start anew without ckpt_path. (Each run has its own folder below"
            " client_store.folder.)"
        )


def _copy_vector(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies a state on a GPU, ``[P]``, into the tensors that it consists of, ``[*shape]``."""
    pieces = vector.split([t.numel() for t in tensors])
    for t, piece in zip(tensors, pieces, strict=True):
        t.copy_(piece.view(t.shape), non_blocking=True)


def _common_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """The type of a file's numbers."""
    return reduce(torch.promote_types, (t.dtype for t in tensors))


def _memory(t: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    content: memoryview = t.view(-1).view(torch.uint8).numpy().data
    return content


def _first_checksum(key: Key, version: int) -> int:
    """The checksum of a version before its content."""
    return zlib.crc32(repr((*key, version)).encode())


def _checksum_bytes(checksum: int) -> bytes:
    return checksum.to_bytes(CHECKSUM_BYTES, "little")


def _fits(device: torch.device) -> bool:
    """Whether the device is a GPU with a quarter of its memory free."""
    if device.type != "cuda":
        return False
    _, total = torch.cuda.mem_get_info(device)
    return 4 * free_memory(device) > total
