"""Files appear whole or not at all, one process at a time, and what the system has against them is said in words."""

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

from gcfed.utils.words import size

log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder that takes the place of ``path`` once the block has succeeded.

    Raises:
        OSError: the system's, with the path; or what is there is no regular file, such as ``/dev/full``.
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
    """Deletes what :func:`replacing` left in a folder when its process was killed; for one who holds its lock."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\..*(\.\w+)\.\d+\1", path.name) and path.is_file():
            path.unlink(missing_ok=True)


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


def scratch() -> TemporaryDirectory:
    """A temporary folder of this process; what killed processes left of theirs goes."""
    for left in Path(gettempdir()).glob("gcfed_[0-9]*_*"):
        try:
            if left.stat().st_uid == os.getuid():
                os.kill(int(left.name.split("_")[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, ValueError):  # somebody else's process has the number now, or another has removed it
            continue
    return TemporaryDirectory(prefix=f"gcfed_{os.getpid()}_")


def in_words(error: BaseException, folder: Path | None = None) -> str:
    """What a user should read of an error, with its notes: of one of the system's about a file what to do.

    Args:
        error: any.
        folder: of the run; None: it has none yet, so an error about a file means that it cannot be made.
    """
    said = " ".join(str(error).split())
    if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL):
        said = _of_a_file(error, Path(error.filename or folder or "."), folder)
    return " ".join([said, *getattr(error, "__notes__", ())])


def _of_a_file(error: OSError, path: Path, folder: Path | None) -> str:
    # Path.is_dir() may raise, of too long a name (Python 3.11)
    full, ours = error.errno in FULL, folder is None or path.is_relative_to(folder)
    if not (full or ours):
        return f"{path}: {error.strerror}."
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.isdir(parent))  # noqa: PTH112
    said = f"{path} cannot be written: {error.strerror}; {size(shutil.disk_usage(there).free)} are free there."
    if full:
        goes_on = folder is not None and ours  # a report, and a run that has not begun, have no checkpoint
        return f"{said} Make room{'; then ckpt_path=last goes on after the last checkpoint' * goes_on}."
    return f"{said} Take a folder that you may write to: paths.log_dir=<folder> (a report: out=<folder>)."
