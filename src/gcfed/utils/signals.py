"""Signals that ask a process to end. Imports nothing heavy: a command hears them from its first line on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked the process to end. No error: what catches errors must let it through."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"asked to end by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum  # as a shell says it


@contextmanager
def stoppable(at_once: Callable[[Stopped], None] | None = None) -> Iterator[None]:
    """Within the block, SIGINT, SIGTERM and SIGHUP raise :class:`Stopped`, so that everything is left as it should be.

    A second signal is not waited for: it ends the process at once.

    Args:
        at_once: says so in place of the exception, and the process ends where it is: while modules are imported, which
            may turn an exception into another or swallow it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)
        if at_once is not None:
            try:
                at_once(Stopped(signum))
            finally:  # whatever half-imported modules have against it
                os._exit(128 + signum)
        raise Stopped(signum)

    before = {signum: signal.signal(signum, stop) for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
