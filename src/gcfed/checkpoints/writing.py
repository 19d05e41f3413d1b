"""Writes checkpoints to the disk while the next round trains."""

import io
import logging
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from gcfed.federated.engine.loop import FederatedLoop
from gcfed.folders.folder import CHECKPOINT, METRICS
from gcfed.utils.checked import Count, checked
from gcfed.utils.files import replacing
from gcfed.utils.refusal import message_of

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file and renames it, so that a kill leaves either the old checkpoint or
    the new one.

    A thread writes while the next round trains. The next checkpoint and the end of the run wait for
    it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._task: Future | None = None  # the last one

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        self.wait()
        content = io.BytesIO()
        torch.save(checkpoint, content)
        self._task = self._thread.submit(_write, content, Path(path))

    def then_delete(self, paths: Iterable[Path]) -> None:
        """Deletes files that the last checkpoint does not need, as soon as it is on the disk."""

        def delete(written: Future | None) -> None:
            if written is not None:
                written.result()  # raises if it could not be written
            for path in paths:
                path.unlink(missing_ok=True)

        self._task = self._thread.submit(delete, self._task)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the last checkpoint is on the disk, at most ``timeout`` seconds.

        Raises OSError if it failed.
        """
        task = self._task
        if task is not None and wait([task], timeout).done:
            self._task = None
            task.result()

    def teardown(self) -> None:
        """Waits.

        Logs an error instead of raising it, because that would hide the error that ended the run.
        """
        try:
            self.wait()
        except OSError as error:
            log.error("%s", message_of(error))
        self._thread.shutdown()


def _write(content: io.BytesIO, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileNotFoundError), (path.parent.parent / METRICS).open("rb") as rows:
            os.fsync(rows.fileno())  # metrics.csv must have every round of the checkpoint


@checked
class RoundCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` to the folder ``dirpath`` after each ``every`` rounds and after the last
    one.
    """

    def __init__(self, dirpath: str, every: Count = 1) -> None:
        self.dirpath = Path(dirpath)
        self.every = every

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._writer = AtomicCheckpointIO()
        trainer.strategy.checkpoint_io = self._writer

    def on_train_batch_start(self, *_: Any) -> None:
        self._writer.wait(0)  # a full disk ends the run in the next round

    def on_train_end(self, *_: Any) -> None:
        self._writer.wait()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        rounds = trainer.global_step
        is_last = rounds >= trainer.max_steps or trainer.should_stop
        if rounds % self.every and not is_last:
            return
        trainer.save_checkpoint(self.dirpath / CHECKPOINT.name, weights_only=False)
        obsolete = FederatedLoop.of(trainer).run.setup.stores.rotate()
        if trainer.is_global_zero:
            self._writer.then_delete(obsolete)
