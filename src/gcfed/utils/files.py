"""Files that are written completely or not at all, locks between processes, and temporary folders."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

log = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder. It replaces ``path`` when the block has succeeded.

    A kill may leave the temporary file; a run deletes those of its folder. An OSError names the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None:  # else the message is ours
            error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[str]:
    """Yields "" if this process got the lock, else its holder: ``process 123 on node4``.

    The system releases the lock when the process ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists():  # its holder deleted it after this process had opened it
                raise BlockingIOError
        except BlockingIOError:
            file.seek(0)
            yield file.read() or "another process"
            return
        except OSError as error:  # a file system without locks
            log.warning("%s: %s. Start one process at a time here: this file system has no locks.", path, error)
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield ""
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # closing alone would leave the lock to processes that were forked meanwhile
                fcntl.flock(file, fcntl.LOCK_UN)


def scratch() -> TemporaryDirectory:
    """A temporary folder, which is deleted when this process ends."""
    return TemporaryDirectory(prefix="gcfed_")


def in_words(error: BaseException) -> str:
    """An error in one line, with its notes."""
    return " ".join([*str(error).split(), *getattr(error, "__notes__", ())])
