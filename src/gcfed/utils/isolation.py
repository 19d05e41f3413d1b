"""A run leaves the process that calls it as it found it."""

import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

LEVELS = {  # of Lightning's loggers during a run; errors still come through
    "lightning.pytorch": logging.WARNING,  # tips and device lists
    "lightning.fabric.utilities.distributed": logging.WARNING,  # a line for each process
    "lightning.pytorch.profilers": logging.INFO,  # debug=profiler prints its table
}
IGNORED = ".*LeafSpec.*|.*dataloader is not resumable.*"  # lightning 2.6 under torch 2.15; a batch is a round
_turn = threading.RLock()


@contextmanager
def isolated() -> Iterator[None]:
    """Restores random generators, torch's threads and precision, warning filters and log levels after the block.

    Threads take turns, because all of this belongs to the process. The memory settings of
    :func:`gcfed.utils.machine.keep_freed_memory` cannot be restored.
    """
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with _turn, torch.random.fork_rng(devices), warnings.catch_warnings():
        loggers, hook = {name: logging.getLogger(name) for name in LEVELS}, sys.excepthook
        restore: list[Callable[[], object]] = [
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002  (users' networks may use it)
            partial(torch.set_num_threads, torch.get_num_threads()),
            partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
            *(partial(logger.setLevel, logger.level) for logger in loggers.values()),
        ]
        warnings.filterwarnings("ignore", message=IGNORED)
        for name, logger in loggers.items():
            logger.setLevel(LEVELS[name])
        try:
            yield
        finally:
            for call in restore:
                call()
            sys.excepthook = hook  # torch's process groups replace it
