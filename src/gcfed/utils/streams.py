"""Standard streams that a run survives: they may be closed, and the reader of a pipe may leave."""

import io
import os
import sys
from typing import Any, TextIO


class LastingFile(io.FileIO):
    """A file descriptor that turns into the null device when nobody reads it any more."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(content)


def keep_streams() -> None:
    """Replaces this process's ``sys.stdout`` and ``sys.stderr`` by streams that never fail.

    A closed descriptor would otherwise be given to the next file that the run opens, and what is
    printed would be written into that file. Streams that somebody else has put in their place stay.
    """
    for descriptor in (0, 1, 2):
        _open_if_closed(descriptor)
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


def _open_if_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None and not _writes_to(stream, descriptor):
        return stream
    if stream is not None:
        stream.flush()
    text = io.BufferedWriter(LastingFile(descriptor, "wb", closefd=False))
    encoding = stream.encoding if stream is not None else "utf-8"
    errors = stream.errors if stream is not None else "backslashreplace"
    buffered_by_line = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(text, encoding=encoding, errors=errors, line_buffering=buffered_by_line)


def _writes_to(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):  # a stream in memory
        return False
