"""What clients keep from one round to the next (control variates, previous models): which version
of each state is valid, where it is, and its part in checkpoints.

The processes of a run share the files (:mod:`~gcfed.federated.state.versioned_files`), and the
system caches them in memory. A run with one process and a GPU keeps states on the GPU while they
fit, and writes files only for checkpoints. A checkpoint contains the versions, and waits until the
files are on the disk. A state has up to two versions: the present one, and that of the last
checkpoint.
"""

import secrets
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from gcfed.federated.network.rows import empty_rows
from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.protocol.messages import Params
from gcfed.federated.state.gpu_states import GpuStates, has_room
from gcfed.federated.state.versioned_files import SENT, Key, VersionedFiles
from gcfed.utils.checked import checked
from gcfed.utils.refusal import Refusal

NONE = -1  # the version of a client that has no state


@checked
class ClientStores:
    """The states of all clients, and their part in a run's checkpoints.

    Args:
        folder: folder of the files; None for a temporary one, without checkpoints.

    Attributes:
        files: the files of the states.
        names: the names of the states that the run's methods keep.
        shared: whether other processes read the files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            self._temporary = TemporaryDirectory(prefix="gcfed_")  # as long as this object lives
        self.files = VersionedFiles(self.folder or Path(self._temporary.name))
        self.names: set[str] = set()
        self.shared = False
        self._gpu_states = GpuStates()
        self._versions: dict[Key, int] = {}  # the present versions
        self._saved_versions: dict[Key, int] = {}  # the versions of the last checkpoint

    def use_folder(self, folder: Path) -> None:
        """Takes another folder, before the first file is written."""
        self.folder = folder
        self.files = VersionedFiles(folder)

    def versions(self, name: str, clients: Sequence[int] | np.ndarray) -> list[int]:
        """Index of the round from whose download each client last wrote its state, or ``NONE``."""
        keys = self._keys(name, clients)
        if self._gpu_states.are_undecided(keys):
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
            Refusal: a client's file is lost, damaged, or of another model. The message names the
                file.
        """
        states = {tensor: empty_rows(t, len(clients)) for tensor, t in like.items()}
        for row, key in enumerate(self._keys(name, clients)):
            state = {tensor: t[row] for tensor, t in states.items()}
            if key in self._gpu_states:
                self._gpu_states.copy_into(list(state.values()), key)
            elif key in self._versions:
                self.files.load_into(list(state.values()), key, self._versions[key])
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
        accepted: Tensor | None = None,
    ) -> None:
        """Replaces the states of these clients, tensor → ``[K, *shape]``.

        Args:
            round_index: becomes the version.
            accepted: the clients whose states are replaced, bool ``[K]``; None: all. For states
                that stay on a GPU, the host reads it at the end of the round, so that it does not
                wait for each client.
        """
        for row, key in enumerate(self._keys(name, clients)):
            pieces = [value[row].detach().reshape(-1) for value in values.values()]
            accepted_row = None if accepted is None else accepted[row]
            if self._stays_on_gpu(key, pieces[0].device):
                self._write_on_gpu(key, round_index, torch.cat(pieces), accepted_row)
            elif accepted_row is None or bool(accepted_row):
                if pieces[0].is_cuda:
                    pieces = [torch.cat(pieces)]  # the host then waits once
                self.files.save(key, round_index, pieces)
                self._mark_written(key, round_index)

    def _stays_on_gpu(self, key: Key, device: torch.device) -> bool:
        return key in self._gpu_states or (not self.shared and has_room(device))

    def _write_on_gpu(
        self, key: Key, round_index: int, vector: Tensor, accepted: Tensor | None
    ) -> None:
        if accepted is None:
            self._gpu_states.write(key, vector)
            self._mark_written(key, round_index)
        else:
            self._gpu_states.write_if(accepted, key, round_index, vector)

    def _decide(self) -> None:
        """Finds which of the states that were written on a GPU count. Waits once for all."""
        for key, round_index in self._gpu_states.decide():
            self._mark_written(key, round_index)

    def finish_round(self, clients: np.ndarray, versions: Set[int]) -> None:
        """Finds on every process the states of these versions that have been written."""
        self._decide()
        if not self.shared:
            return  # this process has written all of them, and knows it
        for name in self.names - {SENT}:
            for key in self._keys(name, clients):
                for version in sorted(versions):
                    if self.files.has(key, version):
                        self._mark_written(key, version)

    # ------------------------------------------------------------------------------------- messages
    def put(self, name: str, index: int, message: bytes) -> None:
        """Keeps a message, which is the same on every process, until it is forgotten."""
        if rank_and_world()[0] == 0:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            self.files.save((name, index), index, [content])
        self._versions[name, index] = index

    def get(self, name: str, index: int) -> bytes:
        """A message. Raises Refusal if its file is lost or damaged."""
        key = name, index
        return self.files.load(key, self._versions[key])

    def forget(self, name: str, held: Set[int]) -> None:
        """Deletes the messages that are not ``held``. Those of the last checkpoint stay until there
        is a newer one.
        """
        for key in list(self._versions):
            if key[0] != name or key[1] in held:
                continue
            version = self._versions.pop(key)
            if self._saved_versions.get(key) != version:
                self.files.delete(key, version)

    def _mark_written(self, key: Key, round_index: int) -> None:
        before = self._versions.get(key, round_index)
        if before not in (round_index, self._saved_versions.get(key)):
            self.files.delete(key, before)
        self._versions[key] = round_index

    # ---------------------------------------------------------------------------------- checkpoints
    def require_folder(self) -> None:
        """Raises Refusal if methods keep states and ``folder`` is None, so that checkpoints would
        not find them.
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
                self._wait_for_disk(key, version)
            name, client = key
            found.setdefault(name, []).extend((client, version))
        return {name: torch.tensor(pairs).view(-1, 2) for name, pairs in found.items()}

    def _wait_for_disk(self, key: Key, version: int) -> None:
        """Waits until a version is on the disk."""
        if key in self._gpu_states:
            self.files.save(key, version, [self._gpu_states.vector(key)])
        self.files.wait_for_disk(key, version)

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
        self._gpu_states.clear()

    def forget_all(self) -> None:
        """Begins anew, for a run with other methods."""
        self.names = set()
        self.restore({})

    def require_files(self) -> None:
        """Raises Refusal if the file of a valid version is lost, and names it."""
        for key, version in self._versions.items():
            self.files.require(key, version)

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
            present = {self.files.path(*item) for item in self._versions.items()}
            self.files.delete_all_but(present, self.names)

    def _require_common_disk(self, strategy: Strategy) -> None:
        mark = self.files.root / f".seen-{secrets.token_hex(8)}"
        if strategy.is_global_zero:
            mark.mkdir(parents=True)
        mark = self.files.root / strategy.broadcast(mark.name)  # it exists by now
        common = strategy.reduce_boolean_decision(mark.is_dir())
        if strategy.is_global_zero:
            mark.rmdir()
        if not common:
            raise Refusal(
                f"client_store.folder={self.files.root} is not the same folder in all processes:"
                " clients would lose their states. Name one on a disk that all nodes see, and one"
                " run folder (hydra.run.dir, folder=)."
            )

    def rotate(self) -> list[Path]:
        """Called after each checkpoint.

        Returns the files that only the checkpoint before it needed.
        """
        replaced = self._saved_versions.items() - self._versions.items()
        obsolete = [self.files.path(*item) for item in replaced]
        self._saved_versions = dict(self._versions)
        return obsolete

    def release(self) -> None:
        """Frees the memory of a GPU. States that are in no checkpoint are lost."""
        self._decide()
        self._gpu_states.clear()
