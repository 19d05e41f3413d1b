"""Writes checkpoints, whole, while the next round trains."""

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
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from gcfed.callbacks.after_round import monitored
from gcfed.federated.loop import FederatedLoop
from gcfed.runs.folder import CHECKPOINT, METRICS, PREVIOUS
from gcfed.utils.checked import Count, checked
from gcfed.utils.files import in_words, replacing

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a new file and renames it, so that a kill at any moment leaves the old checkpoint or the new one, whole.

    The old one becomes ``previous.ckpt`` if this run has read or written it. A thread writes while the next round
    trains; the next checkpoint and the end of the run wait for it.
    """

    newest: Path | None = None  # a checkpoint of this run that is whole

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._tasks: list[Future] = []

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.newest = Path(path).resolve()
        return super().load_checkpoint(path, *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.wait()
        content = io.BytesIO()
        torch.save(checkpoint, content)
        self._tasks = [self._thread.submit(self._write, content, Path(path).resolve())]

    def then_delete(self, paths: Iterable[Path]) -> None:
        """Deletes files that the last checkpoint does not need, once it is on the disk."""

        def delete(written: list[Future]) -> None:
            for path in paths if all(task.exception() is None for task in written) else ():
                path.unlink(missing_ok=True)

        self._tasks.append(self._thread.submit(delete, self._tasks[:1]))

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the last checkpoint is on the disk, at most so many seconds. OSError if it cannot be written."""
        for task in wait(self._tasks, timeout).done:  # a signal may interrupt the wait: forget only what is done
            self._tasks.remove(task)
            task.result()

    def teardown(self) -> None:
        """Waits. An error is logged, because raising it would hide the one that ended the run."""
        while self._tasks:
            try:
                self.wait()
            except OSError as error:
                log.error("%s", in_words(error))
        self._thread.shutdown()

    def _write(self, content: io.BytesIO, path: Path) -> None:
        last, previous = path.name == CHECKPOINT.name, path.with_name(PREVIOUS.name)
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError), (path.parent.parent / METRICS).open("rb") as rows:
                os.fsync(rows.fileno())  # a run whose file lacks a round of its checkpoint cannot go on
            if last and self.newest != previous:
                previous.unlink(missing_ok=True)
            if last and self.newest == path:
                with suppress(OSError):
                    previous.hardlink_to(path)
        self.newest = path if last else self.newest


@checked
class RoundCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` to the folder ``dirpath`` after each ``every`` rounds and after the last one."""

    def __init__(self, dirpath: str, every: Count = 1) -> None:
        self.dirpath, self.every = Path(dirpath), every

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.checkpoint_io = self._writer = AtomicCheckpointIO()

    def on_train_batch_start(self, *_: Any) -> None:
        self._writer.wait(0)  # a disk that has become full ends the run here, not rounds later

    def on_train_end(self, *_: Any) -> None:
        self._writer.wait()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        done = trainer.global_step
        if done % self.every == 0 or done >= trainer.max_steps or trainer.should_stop:
            trainer.save_checkpoint(self.dirpath / CHECKPOINT.name, weights_only=False)
            obsolete = FederatedLoop.of(trainer).stores.rotate()
            if trainer.is_global_zero:
                self._writer.then_delete(obsolete)


class BestCheckpoint(ModelCheckpoint):
    """Lightning's, by any column of ``metrics.csv``: the checkpoint of the best round, for src/eval.py.

    It must come before :class:`RoundCheckpoint`, so that ``last.ckpt`` knows the best round so far.
    """

    def __init__(self, dirpath: str, monitor: str, mode: str = "max", filename: str = "best") -> None:
        super().__init__(
            dirpath, filename, monitor, mode=mode, enable_version_counter=False, save_on_train_epoch_end=False
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if monitored(trainer, outputs, self.monitor or ""):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_validation_end(self, *_: Any) -> None: ...
