"""Signals that ask a process to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked the process to end. No error: what catches errors must let it through."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"asked to end by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum  # as a shell says it


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block, SIGINT, SIGTERM and SIGHUP raise :class:`Stopped`, so that everything is left as it should be.

    A second signal is not waited for: it ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(signum)

    before = {signum: signal.signal(signum, stop) for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
