"""Files that appear whole or not at all, locks between processes, and temporary folders."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

log = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which replaces ``path`` when the block has succeeded.

    Raises the system's OSError with the path; also if ``path`` is there and no regular file, such as ``/dev/full``.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there, and no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None:  # none: words of ours
            error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Deletes what killed processes left of :func:`replacing`. The caller holds the folder's lock."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\..*(\.\w+)\.\d+\1", path.name) and path.is_file():
            path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[str]:
    """Yields "" if this process has the lock now, else who has it: ``process 123 on node4``.

    The system releases the lock when the process ends. On a file system without locks a warning is logged, and every
    process gets the lock.
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


def scratch() -> TemporaryDirectory:
    """A temporary folder of this process. Deletes those of killed processes."""
    for left in Path(gettempdir()).glob("gcfed_[0-9]*_*"):
        try:
            if left.stat().st_uid == os.getuid():
                os.kill(int(left.name.split("_")[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, ValueError):  # somebody else's process has the number now, or another has removed it
            continue
    return TemporaryDirectory(prefix=f"gcfed_{os.getpid()}_")


def in_words(error: BaseException) -> str:
    """An error in one line, with its notes."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = ["Make room; then ckpt_path=last goes on after the last checkpoint."] * full
    return " ".join([*str(error).split(), *getattr(error, "__notes__", ()), *advice])
