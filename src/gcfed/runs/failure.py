"""How a run ends that does not come to its end: ``failure.txt``, and signals that ask it to."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException

from gcfed.runs.folder import FAILURE
from gcfed.utils.files import replacing

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


@contextmanager
def failure_recorded(folder: Path, *, write: bool = True) -> Iterator[None]:
    """Removes an earlier run's ``failure.txt`` from the folder, and writes one if the block ends by an exception.

    Its first line is ``Type: message``, the rest the traceback. ``write=False`` for all processes but the first.
    """
    path = folder / FAILURE
    if write and path.is_file():
        path.unlink()
    try:
        yield
    except BaseException as error:
        if write:
            with suppress(OSError), replacing(path) as temporary:  # a full disk must not hide the error itself
                temporary.write_text(f"{headline(error)}\n\n{''.join(traceback.format_exception(error))}")
        raise


def headline(error: BaseException) -> str:
    """``Type: message`` in one line."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__  # Lightning turns a Ctrl-C into an exit
    if isinstance(error, KeyboardInterrupt):
        message = "stopped by the user"
    elif isinstance(error, SIGTERMException):
        message = "asked to end by SIGTERM"
    else:
        message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message}"
