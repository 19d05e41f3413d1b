"""A run does not depend on the process that calls it, and leaves it unchanged."""

import logging
import multiprocessing
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

from gcfed.utils.autocast import outside_autocast

LEVELS = {  # of Lightning's loggers during a run; errors still come through
    "lightning.pytorch": logging.WARNING,  # tips and device lists
    "lightning.fabric.utilities.distributed": logging.WARNING,  # a line for each process
    "lightning.pytorch.profilers": logging.INFO,  # debug=profiler prints its table
}
# lightning 2.6 under torch 2.15; a batch is a round
IGNORED = ".*LeafSpec.*|.*dataloader is not resumable.*"
_turn = threading.RLock()


@contextmanager
def isolated() -> Iterator[None]:
    """Restores random generators, torch's threads, types and precision, warnings, log levels, and
    how processes start.

    Threads take turns, because all of this belongs to the process.
    """
    with _turn, warnings.catch_warnings(), ExitStack() as restore:
        restore.callback(_set_rng_states, _collect_rng_states(torch.cuda.is_initialized()))
        restore.callback(torch.set_num_threads, torch.get_num_threads())
        restore.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)  # ``precision`` decides
        restore.enter_context(outside_autocast())  # the caller's would keep cast weights
        restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        # torch's process groups replace it
        restore.callback(setattr, sys, "excepthook", sys.excepthook)
        # None, until somebody asks for the default
        start = multiprocessing.get_start_method(allow_none=True)
        restore.callback(multiprocessing.set_start_method, start, force=True)
        for name in ("gcfed", "gcfed_sites", *LEVELS):
            logger = logging.getLogger(name)
            restore.callback(logger.setLevel, logger.level)
            logger.setLevel(LEVELS.get(logger.name, logger.level))
        warnings.filterwarnings("ignore", message=IGNORED)
        yield
