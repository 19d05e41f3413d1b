"""Files that are written completely or not at all, and files that a kill may have cut short."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

#: ``yaml.safe_load``'s loader, ten times as fast where there is a C library.
YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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


def write_text(path: Path, text: str) -> None:
    """Writes a text as :func:`replacing` does. Letters that UTF-8 lacks, as a folder's name may
    have, become escapes.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def whole_lines(path: Path) -> list[str]:
    """The lines of a file without a last one that a kill has cut short; none without the file."""
    if not path.is_file():
        return []
    *lines, _ = path.read_text(encoding="utf-8-sig").split("\n")
    return lines
