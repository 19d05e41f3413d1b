"""Files that are written completely or not at all, and temporary folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder.

    It replaces ``path`` when the block has succeeded.

    A kill may leave the temporary file; a run deletes those of its folder. An OSError names the
    path.
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
