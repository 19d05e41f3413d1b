"""Files appear whole or not at all, and what the system has against them is said in words."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from gcfed.utils.words import size

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder that takes the place of ``path`` once the block has succeeded.

    Raises:
        OSError: the system's, with the path.
    """
    refuse_device(path)
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


def refuse_device(path: Path) -> None:
    """Refuses to replace or to delete what is there and is no regular file, such as ``/dev/full``.

    Raises:
        OSError: it is a device, a pipe or a folder.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there, and no regular file", str(path))


def scratch() -> TemporaryDirectory:
    """A temporary folder of this process; what killed processes left of theirs goes."""
    for left in Path(gettempdir()).glob("gcfed_[0-9]*_*"):
        with suppress(OSError, ValueError):
            if left.stat().st_uid == os.getuid() and not _is_alive(int(left.name.split("_")[1])):
                shutil.rmtree(left)
    return TemporaryDirectory(prefix=f"gcfed_{os.getpid()}_")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def remove_temporaries(folder: Path) -> None:
    """Deletes what :func:`replacing` left in a folder when its process was killed; for one who holds its lock."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\..*(\.\w+)\.\d+\1", path.name) and path.is_file():
            path.unlink(missing_ok=True)


def in_words(error: BaseException, folder: Path | None = None) -> str:
    """What a user should read of an error, with its notes: of one of the system's about a file what to do.

    Args:
        error: any.
        folder: of the run; None: it has none yet, so an error about a file means that it cannot be made.
    """
    return " ".join([_in_words(error, folder), *getattr(error, "__notes__", ())])


def _in_words(error: BaseException, folder: Path | None) -> str:
    if not isinstance(error, OSError) or (error.filename is None and error.errno not in FULL):
        return " ".join(str(error).split())
    path, full = Path(error.filename or folder or "."), error.errno in FULL
    ours = folder is None or path.is_relative_to(folder)
    if not (full or ours):
        return f"{path}: {error.strerror}."
    there = next(parent for parent in (path, *path.absolute().parents) if _is_folder(parent))
    said = f"{path} cannot be written: {error.strerror}; {size(shutil.disk_usage(there).free)} are free there."
    if full:
        goes_on = folder is not None and ours  # a report, and a run that has not begun, have no checkpoint
        return f"{said} Make room{'; then ckpt_path=last goes on after the last checkpoint' * goes_on}."
    return f"{said} Take a folder that you may write to: paths.log_dir=<folder> (a report: out=<folder>)."


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # too long a name, or below a folder that may not be entered (Python 3.11)
        return False
