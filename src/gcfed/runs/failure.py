"""``failure.txt``: how a run ended that did not come to its end."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch.utilities.exceptions import SIGTERMException

from gcfed.runs.folder import FAILURE
from gcfed.utils.files import replacing


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
