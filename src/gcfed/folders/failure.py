"""``failure.txt``, which says how a run failed."""

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gcfed.folders.folder import FAILURE
from gcfed.utils.files import write_text
from gcfed.utils.refusal import Refusal, message_of
from gcfed.utils.stopped import Stopped


@contextmanager
def failure_recorded(folder: Path, *, write: bool) -> Iterator[None]:
    """Deletes ``failure.txt``, and writes it if the block raises: ``Type: message``, then the
    traceback.
    """
    path = folder / FAILURE
    if write and path.is_file():
        path.unlink()
    try:
        yield
    except BaseException as error:
        if write:
            details = "".join(traceback.format_exception(error))
            # a full disk must not hide the error itself
            with suppress(OSError):
                write_text(path, f"{headline(error)}\n\n{details}")
        raise


def headline(error: BaseException) -> str:
    """An error in one line: ``Type: message``; the message alone if it says all, as ``No space left
    on device: 'metrics.csv'`` does.

    Ctrl-C has the sentence of :class:`Stopped`, wherever Python raises it.
    """
    if isinstance(error, KeyboardInterrupt):
        return str(Stopped(signal.SIGINT))
    message = message_of(error) or "no message"
    if isinstance(error, Refusal | Stopped):
        return message
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: '{error.filename}'"
    return f"{type(error).__name__}: {message}"
