"""The stores of a run's methods, and their part in its checkpoints."""

import secrets
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from gcfed.federated.state.client_store import ClientStore
from gcfed.utils.checked import checked


@checked
class ClientStores:
    """Makes the stores of a run's methods, and saves and loads them with its checkpoints.

    Args:
        folder: folder of the files; None for a temporary one, without checkpoints.

    Attributes:
        opened: the stores, by name.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.opened: dict[str, ClientStore] = {}
        self._loaded: dict[str, Any] = {}

    def open(self, name: str) -> ClientStore:
        """The store of this name; the same one each time."""
        if name not in self.opened:
            self.opened[name] = ClientStore((self.folder or Path(self._temporary.name)) / name)
        return self.opened[name]

    @cached_property
    def _temporary(self) -> TemporaryDirectory:
        return TemporaryDirectory(prefix="gcfed_")

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Raises ValueError if a file that a checkpoint needs is lost, and names it."""
        for name in self.opened.keys() & checkpoint.keys():
            self.opened[name].load_state_dict(checkpoint[name])
            self.opened[name].check()

    def start(self, trainer: Trainer) -> None:
        """Called once before the first round, on every process. Goes back to a loaded checkpoint, and deletes the files
        that an earlier run or a kill has left.

        Raises:
            ValueError: the processes do not see a common folder.
        """
        if trainer.world_size > 1 and self.opened:
            self._require_common_disk(trainer.strategy)
        for name, store in self.opened.items():
            store.shared = trainer.world_size > 1
            if name in self._loaded:
                store.load_state_dict(self._loaded[name])
            if trainer.is_global_zero:
                store.clear()
        self._loaded = {}

    def require_folder(self) -> None:
        """Raises ValueError if a method keeps states and no folder is named, where checkpoints would find them."""
        if self.opened and self.folder is None:
            raise ValueError("client_store.folder=null: checkpoints need the clients' states: name a folder.")

    def _require_common_disk(self, strategy: Strategy) -> None:
        folder = next(iter(self.opened.values())).folder.parent
        mark = folder / strategy.broadcast(f".seen-{secrets.token_hex(8)}")
        if strategy.is_global_zero:
            mark.mkdir(parents=True)
        strategy.barrier()
        common = strategy.reduce_boolean_decision(mark.is_dir())
        if strategy.is_global_zero:
            mark.rmdir()
        if not common:
            raise ValueError(
                f"client_store.folder={folder} is not the same folder in all processes: clients would lose their "
                "states. Name one on a disk that all nodes see, and one run folder (hydra.run.dir, folder=)."
            )

    def finish_round(self, cohort: np.ndarray, round: int) -> None:
        """Notes on every process the states that others have written in this round."""
        for store in self.opened.values():
            for client in cohort.tolist():
                if store.path(client, round).is_file():
                    store.mark_written(client, round)

    @property
    def of_clients(self) -> dict[str, ClientStore]:
        """The stores that clients write."""
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
