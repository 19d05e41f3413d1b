"""Locks between processes: one run trains in a folder at a time.

The ``filelock`` package does not name the holder, and leaves its files. On a file system without
locks it uses the mere existence of a file, so that a killed process would lock for ever.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from gcfed.folders.folder import CHECKPOINT
from gcfed.utils.machine import leads
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Locks a run's folder while its first process works there.

    A run that is refused leaves no folder.
    """
    if not leads():
        yield
        return
    try:
        with locked(folder / ".lock") as holder:
            if holder:
                raise Refusal(
                    f"{folder} is in use by {holder}: wait until it has ended, or name another"
                    " folder."
                )
            for place in (folder, (folder / CHECKPOINT).parent):
                # temporary files of a killed process (utils/files.py)
                for left in place.glob(".*.[0-9]*.*"):
                    left.unlink()
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # succeeds if it is empty


@contextmanager
def locked(path: Path) -> Iterator[str]:
    """Yields "" if this process got the lock, else its holder: ``process 123 on node4``.

    The system releases the lock when the process ends.
    """
    file, holder = _open_and_lock(path)
    with file:
        if holder:
            yield holder
            return
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield ""
        finally:
            path.unlink(missing_ok=True)
            # closing alone would leave the lock to processes that were forked meanwhile
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _open_and_lock(path: Path) -> tuple[IO[str], str]:
    """The open lock file, and "" if this process got the lock, else its holder."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            return file, file.read() or "another process"
        except OSError as error:  # a file system without locks
            log.warning(
                "%s: %s. Start one process at a time here: this file system has no locks.",
                path,
                error,
            )
            return file, ""
        if os.fstat(file.fileno()).st_nlink:
            return file, ""
        # Its holder has ended, and deleted the file after this process had opened it, and the
        # folder if that was empty.
        file.close()
