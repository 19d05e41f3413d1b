"""A round is a transaction: the state after it goes to the disk whole, or not at all."""

import io
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from gcfed.federated.loop import FederatedLoop
from gcfed.runs.folder import CHECKPOINT, PREVIOUS
from gcfed.utils.files import replacing
from gcfed.utils.number import number


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the old checkpoint and renames: a kill at any moment leaves the one or the other, whole.

    The old one is kept as ``previous.ckpt``, if this run has read or written it and the file system has hard links.
    A thread waits for the disk while the next round trains; what goes there is made before, from what holds now. The
    next checkpoint, and the end of the run, wait for the thread and raise what it met.

    Lightning's own writer goes through the system's temporary folder, which may lie on another file system: its last
    move is then a copy over the old file.
    """

    newest: Path | None = None  # checkpoint of this run that is known to be whole
    _writing: Future | None = None

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.newest = Path(path).resolve()
        return super().load_checkpoint(path, *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        self.wait()
        thread = ThreadPoolExecutor(1)
        self._writing = thread.submit(self._write, content, Path(path).resolve())
        thread.shutdown(wait=False)

    def then_delete(self, paths: Iterable[Path]) -> None:
        """Deletes these files once the checkpoint that does not need them is on the disk."""

        def delete(written: Future) -> None:
            if written.exception() is None:
                for path in paths:
                    path.unlink(missing_ok=True)

        if self._writing is not None:
            self._writing.add_done_callback(delete)

    def wait(self) -> None:
        """Until the checkpoint that was saved last is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def teardown(self) -> None:
        self.wait()

    def _write(self, content: io.BytesIO, path: Path) -> None:
        previous = path.with_name(PREVIOUS.name)
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            if self.newest != previous:
                previous.unlink(missing_ok=True)
            if self.newest == path:
                with suppress(OSError):
                    previous.hardlink_to(path)
        self.newest = path


class RoundCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` when a round is finished, its test included; the one before becomes ``previous.ckpt``.

    Args:
        dirpath: folder of the checkpoints.
        every: rounds between two checkpoints; the last round is always saved.
    """

    def __init__(self, dirpath: str, every: int = 1) -> None:
        self.dirpath, self.every = Path(dirpath), number("callbacks.checkpoint.every", every, 1, whole=True)
        self._tested = False

    def on_train_batch_start(self, *_: Any) -> None:
        self._tested = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        loop = FederatedLoop.of(trainer)
        if not loop.tested(trainer.global_step):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self._tested:
            self._tested = True
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        done = trainer.global_step
        if done % self.every == 0 or done >= trainer.max_steps or trainer.should_stop:
            trainer.save_checkpoint(self.dirpath / CHECKPOINT.name, weights_only=False)
            obsolete = FederatedLoop.of(trainer).stores.rotate()
            writer = trainer.strategy.checkpoint_io
            if isinstance(writer, AtomicCheckpointIO):
                writer.then_delete(obsolete)
