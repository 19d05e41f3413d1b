"""Files appear whole or not at all."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder that takes the place of ``path`` once the block has succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Deletes what :func:`replacing` left below a folder when its process was killed; for one who holds its lock."""
    for path in folder.rglob(".*"):
        if re.fullmatch(r"\..+\.\d+(\.\w+)?", path.name) and path.is_file():
            path.unlink(missing_ok=True)
