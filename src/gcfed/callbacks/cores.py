"""Notices when a run's threads fight over the cores."""

import logging
import os
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)


class CoreWatch(Callback):
    """Warns, once, when the system keeps taking the cores away from this process.

    It counts involuntary context switches. Seen on two cores: 40 a second in a training process that has them to
    itself, 280 to 310 in each of four one-thread processes, 860 to 2,030 in one of two threads beside a busy loop,
    which halves its speed.

    Args:
        per_second: switches a second from which on it warns.
        window: seconds to count over; the first one, with its start-up, is not looked at.
    """

    def __init__(self, per_second: float = 200.0, window: float = 5.0) -> None:
        self.per_second, self.window = per_second, window
        self._since: tuple[float, int] | None = None
        self._windows = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        watches = resource is not None and trainer.is_global_zero and trainer.strategy.root_device.type == "cpu"
        self._since = (time.perf_counter(), _switches()) if watches else None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._since is None or (seconds := time.perf_counter() - self._since[0]) < self.window:
            return
        switches, self._windows = _switches(), self._windows + 1
        rate = (switches - self._since[1]) / seconds
        self._since = (time.perf_counter(), switches)
        if self._windows > 1 and rate > self.per_second:
            self._since = None
            log.warning(
                "this run's %d × %d threads lose their cores to others %.0f times a second (load %.1f on %d cores): it "
                "will be slow. Run fewer programs at once, or give each a share with OMP_NUM_THREADS=1.",
                trainer.world_size, torch.get_num_threads(), rate, os.getloadavg()[0], os.cpu_count(),
            )  # fmt: skip


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
