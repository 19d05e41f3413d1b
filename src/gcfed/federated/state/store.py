"""The stores of a run's methods, and how they go through its checkpoints."""

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.strategies import Strategy

from gcfed.federated.state.client_store import ClientStore
from gcfed.utils.checked import checked
from gcfed.utils.files import scratch


@checked
class ClientStores:
    """Makes the stores of a run's methods and carries them through checkpoints.

    Args:
        dtype: of what is stored: null (that of the model) or ``bfloat16`` (half the size of float32).
        folder: where files go; None: a temporary one, without checkpoints.

    Attributes:
        opened: the stores, by name.
    """

    def __init__(self, dtype: Literal["bfloat16"] | None = None, folder: str | Path | None = None) -> None:
        self.dtype = None if dtype is None else torch.bfloat16
        self.folder = None if folder is None else Path(folder)
        self.opened: dict[str, ClientStore] = {}
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._loaded: dict[str, Any] = {}

    def open(self, name: str) -> ClientStore:
        """The store of this name; the same one each time."""
        if name not in self.opened:
            if self.folder is None:
                self._temporary = self._temporary or scratch()
            folder = self.folder or Path(self._temporary.name)  # type: ignore[union-attr]
            self.opened[name] = ClientStore(folder / name, dtype=self.dtype)
        return self.opened[name]

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Reads the files that a checkpoint refers to, before anything in the run's folder is changed.

        Raises:
            ValueError: a client's state is damaged or gone; names it.
        """
        for name in self.opened.keys() & checkpoint.keys():
            self.opened[name].load_state_dict(checkpoint[name])
            self.opened[name].check()

    def start(self, world_size: int, *, first: bool = True) -> None:
        """Called once before the first round, on every process: takes up a loaded checkpoint.

        The ``first`` process also deletes the files that an earlier run, or a kill, has left.

        Raises:
            ValueError: several processes without a folder.
        """
        if world_size > 1:
            self.require_folder()
        for name, store in self.opened.items():
            store.shared = world_size > 1
            if name in self._loaded:
                store.load_state_dict(self._loaded[name])
            if first:
                store.clear()
        self._loaded = {}

    def require_folder(self) -> None:
        """Raises ValueError if a method keeps states, and checkpoints or other processes could not find them."""
        if self.opened and self.folder is None:
            raise ValueError("client_store.folder=null: checkpoints refer to clients' states there; name a folder.")

    def require_common_disk(self, strategy: Strategy) -> None:
        """Raises ValueError if a method keeps states, and their folder is not the same in all processes."""
        if not self.opened or self.folder is None:
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
                f"client_store.folder={self.folder} is not the same folder in all processes: a client that trains in "
                "another one than before would not find its state. Name one on a disk that all nodes see, and one run "
                "folder for all processes (hydra.run.dir, folder=)."
            )

    def finish_round(self, cohort: np.ndarray, round: int) -> None:
        """Every process notes what the others have written for this round's cohort."""
        for store in self.opened.values():
            for client in cohort.tolist():
                if store.path(client, round).is_file():
                    store.mark_written(client, round)

    @property
    def of_clients(self) -> dict[str, ClientStore]:
        """The stores of ``opened`` that clients write."""
        return {name: store for name, store in self.opened.items() if not store.servers}

    def release(self) -> None:
        for store in self.opened.values():
            store.release()

    def rotate(self) -> list[Path]:
        return [path for store in self.opened.values() for path in store.rotate()]

    def state_dict(self) -> dict[str, Any]:
        self.require_folder()
        return {name: store.state_dict() for name, store in self.opened.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
