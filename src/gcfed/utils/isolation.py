"""A run leaves the process that calls it as it found it."""

import logging
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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
        drawn, drawn_by_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (users' networks may use it)
        levels = {name: logging.getLogger(name).level for name in LEVELS}
        threads, precision, hook = torch.get_num_threads(), torch.get_float32_matmul_precision(), sys.excepthook
        warnings.filterwarnings("ignore", message=IGNORED)
        for name, level in LEVELS.items():
            logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(drawn_by_numpy)  # noqa: NPY002
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            sys.excepthook = hook  # torch's process groups replace it
