"""The raw files of data sets: what is missing, what is there, and what is not read."""

import hashlib
import http.client
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)
Note = Callable[[int, str], None]
"""``note(level, text)`` logs a text, like ``logging.log``."""
#: Names of folders, files and splits. If several exist, the first of them is used.
TRAINS = ("train", "training", "training_set")
TESTS = ("test", "testing", "test_set", "val", "valid", "validation")


def missing_files(
    name: str, folder: Path, trouble: str, page: str, download_is_off: bool = False
) -> FileNotFoundError:
    """An error that names the data set, the folder that was searched, and what to do."""
    put = "Set data.dataset.download=true, put" if download_is_off else "Put"
    return FileNotFoundError(
        f"data set {name}: {trouble} (searched {folder.resolve()}). {put} the files of {page}"
        " there, or set paths.data_dir (DATA_DIR) to the folder that has them."
    )


def obtain(path: Path, md5: str, url: str, name: str, download: bool) -> None:
    """Downloads a file of the data set ``name``, unless it is there with this checksum.

    Raises FileNotFoundError if the file is missing or damaged and is not downloaded.
    """
    from torchvision.datasets.utils import check_integrity, download_url

    if check_integrity(path, md5):
        return
    if not download:
        trouble = f"{path.name} is missing, or its md5 is not {md5}"
        raise missing_files(name, path.parent, trouble, url, download_is_off=True)
    try:
        download_url(url, path.parent, path.name, md5)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise missing_files(
            name, path.parent, f"{path.name} cannot be downloaded ({error})", url
        ) from error


def count_files(folder: Path, *patterns: str) -> str:
    """The number of files in the folders of each pattern; empty if there is none. It is a
    ``source`` of :func:`gcfed.data.sets.cache.cached`.
    """
    if not folder.is_dir():
        return ""
    counts = []
    for pattern in patterns:
        counts.append(sum(len(os.listdir(place)) for place in folder.glob(pattern)))  # noqa: PTH208
    return f"{counts} files"


def hash_files(files: Sequence[Path]) -> str:
    """A hash of the files' names, sizes and times: a ``source`` of
    :func:`gcfed.data.sets.cache.cached`.
    """
    about = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{len(about)} files, {hashlib.sha256(repr(about).encode()).hexdigest()}"


def listing(names: Sequence[str]) -> str:
    """The first five names, for a message."""
    shown = list(names[:5])
    if len(names) > 5:
        shown.append("…")
    return ", ".join(shown) or "nothing"


def entries(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """All files below the folder, in the order of their paths, and all folders without an entry.

    Links to folders are followed, but for a link to a folder ``above`` it.
    """
    above |= {folder.resolve()}
    for path in sorted(folder.iterdir()):
        is_circle = path.is_dir() and path.resolve() in above
        if is_circle or not path.is_dir():
            yield path
            continue
        inside = list(entries(path, above))
        yield from inside or [path]


def why_unread(path: Path, folder: Path) -> str:
    """Why no reader takes this entry of the folder, whatever it looks for; empty if one may."""
    if any(part.startswith(".") for part in path.relative_to(folder).parts):
        return "hidden"
    if path.is_dir():
        return "a link to a folder above it" if any(path.iterdir()) else "an empty folder"
    return "" if path.is_file() else "no file, or a broken link"


def note_unread(folder: Path, why: Mapping[Path, str], note: Note = log.log) -> None:
    """Notes for each reason how many entries of a folder are not read, and the first of them.

    Args:
        why: the entries that are not read, with the reason.
    """
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for path, reason in why.items():
        names_of[reason].append(str(path.relative_to(folder)))
    for reason, names in names_of.items():
        count = "1 entry is" if len(names) == 1 else f"{len(names)} entries are"
        note(logging.WARNING, f"{folder}: {count} not read ({reason}): {listing(names)}")


def rows_of(path: Path, columns: int, separator: str | None = None) -> list[list[str]]:
    """The cells of each line, split at white space or the separator.

    Raises Refusal if a line has fewer columns.
    """
    lines = path.read_text("utf-8", "replace").splitlines()
    rows = [line.split(separator) for line in lines if line.strip()]
    if not rows or min(map(len, rows)) < columns:
        raise Refusal(f"{path} is empty or damaged: take the official one.")
    return rows
