"""A lock that a process holds as long as it lives: what is locked is done by one process at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def locked(path: Path) -> Iterator[str]:
    """Yields "" where this process has the lock now, else who has it: ``process 123 on node4``.

    The system lets go of it when the process ends, however it ends; the file is deleted by whoever held it to the end.
    Where the file system has no locks, as some shared disks, a warning says so and everyone gets it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            yield file.read().strip() or "another process"
            return
        except OSError as error:
            log.warning("%s: %s. Start one process at a time here: nothing else keeps two apart.", path, error)
            yield ""
            return
        if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
            yield "a process that has just ended"  # it deleted the file between our opening and locking it
            return
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield ""
        finally:
            path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it to processes that were forked meanwhile
