"""The raw files of data sets, and the cache of the arrays decoded from them.

A data set is decoded once, into ``<data_dir>/cache/<name>/*.npy``. Later runs map these files into
memory. A killed build may leave a folder ``.build-*``, which can be deleted.
"""

import hashlib
import http.client
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)
Note = Callable[[int, str], None]
"""``note(level, text)`` logs a text, like ``logging.log``."""
#: Names of folders, files and splits. If several exist, the first of them is used.
TRAINS = ("train", "training")
TESTS = ("test", "testing", "val", "valid", "validation")


def missing(name: str, folder: Path, trouble: str, page: str) -> FileNotFoundError:
    """An error that names the data set, the folder that was searched, and what to do."""
    return FileNotFoundError(
        f"data set {name}: {trouble} (searched {folder.resolve()}). Run with"
        f" data.dataset.download=true, put the files of {page} there, or set paths.data_dir"
        " (DATA_DIR) to the folder that has them."
    )


def obtain(path: Path, md5: str, url: str, name: str, download: bool) -> None:
    """Downloads a file of the data set ``name``, unless it is there with this checksum.

    Raises FileNotFoundError if the file is missing or damaged and is not downloaded.
    """
    from torchvision.datasets.utils import check_integrity, download_url

    if check_integrity(path, md5):
        return
    if not download:
        raise missing(name, path.parent, f"{path.name} is missing, or its md5 is not {md5}", url)
    try:
        download_url(url, path.parent, path.name, md5)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise missing(
            name, path.parent, f"{path.name} cannot be downloaded ({error})", url
        ) from error


def counted(folder: Path, *patterns: str) -> str:
    """The number of files in the folders of each pattern, as a ``source`` of :func:`cached`; empty
    if there is none.
    """
    if not folder.is_dir():
        return ""
    counts = []
    for pattern in patterns:
        counts.append(sum(len(os.listdir(place)) for place in folder.glob(pattern)))  # noqa: PTH208
    return f"{counts} files"


def written(files: Sequence[Path]) -> str:
    """A hash of the files' names, sizes and times, as a ``source`` of :func:`cached`."""
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


def report_unread(folder: Path, left: Mapping[str, Sequence[Path]], note: Note = log.log) -> None:
    """Logs for each reason how many entries of the folder are not read, and the first of them."""
    for reason, paths in left.items():
        if not paths:
            continue
        names = [str(path.relative_to(folder)) for path in paths]
        count = "1 entry is" if len(names) == 1 else f"{len(names)} entries are"
        note(logging.WARNING, f"{folder}: {count} not read ({reason}): {listing(names)}")


def rows_of(path: Path, columns: int, separator: str | None = None) -> list[list[str]]:
    """The cells of each line, split at white space or the separator.

    Raises ValueError if a line has fewer columns.
    """
    lines = path.read_text("utf-8", "replace").splitlines()
    rows = [line.split(separator) for line in lines if line.strip()]
    if not rows or min(map(len, rows)) < columns:
        raise Refusal(f"{path} is empty or damaged: take the official one.")
    return rows


# ---------------------------------------------------------------------------------------- the cache
MANIFEST = "manifest.json"


class Keep:
    """Writes the splits of a data set to a folder: ``keep("train", x, y, groups)``.

    ``keep.note(level, text)`` keeps a text that is logged whenever the data set is read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[tuple[int, str]] = []

    def note(self, level: int, text: str) -> None:
        self.notes.append((level, text))

    def __call__(
        self,
        part: str,
        x: np.ndarray | Iterable[np.ndarray],
        y: np.ndarray,
        groups: np.ndarray | None = None,
    ) -> None:
        """Writes one split.

        Args:
            part: ``train`` or ``test``.
            x: the samples [n, …], or blocks of them.
            y: their labels [n, …].
            groups: their natural clients [n].

        Raises ValueError if the numbers of samples and labels differ.
        """
        blocks = [x] if isinstance(x, np.ndarray) else x
        end = 0
        for block in blocks:
            if end == 0:
                shape = (len(y), *block.shape[1:])
                path = self.folder / f"{part}_x.npy"
                out = np.lib.format.open_memmap(path, mode="w+", dtype=block.dtype, shape=shape)
            start = end
            end += len(block)
            if end > len(y):
                break
            out[start:end] = block
        if end == 0:
            raise Refusal(f"the {part} split is empty")
        if end != len(y):
            raise Refusal(f"the {part} split has {len(y)} labels, and not as many samples")
        np.save(self.folder / f"{part}_y.npy", y)
        if groups is not None:
            np.save(self.folder / f"{part}_groups.npy", groups)


Build = Callable[[Keep], tuple[int, Sequence[str]]]
"""Keeps the splits ``train`` and ``test``. Returns the number of classes and their names."""


def cached(data_dir: str | Path, name: str, build: Build, source: str = "") -> FederatedDataset:
    """The data set ``name`` from its cache, and the notes of its build in the log.

    Builds the cache first if it is missing, damaged or of another source.

    ``source`` identifies the raw files. Empty: any cache will do, because the raw files have
    checksums or were deleted.

    Raises what ``build`` raises; ValueError for samples and labels that do not match; OSError if it
    cannot write.
    """
    folder = Path(data_dir) / "cache" / name
    if (folder / MANIFEST).is_file():
        try:
            about = json.loads((folder / MANIFEST).read_text())
            if source in ("", about["source"]):
                return _dataset(folder, about["info"])
        except (OSError, EOFError, ValueError, KeyError) as error:
            log.warning("Building the cache %s again: %s", folder, error)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        prefix=".build-", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        stage = Path(scratch) / name
        stage.mkdir()
        keep = Keep(stage)
        num_classes, names = build(keep)
        info = {"num_classes": num_classes, "class_names": [*names], "notes": keep.notes}
        (stage / MANIFEST).write_text(json.dumps({"source": source, "info": info}))
        # maps its own files: another process may replace the folder at any time
        dataset = _dataset(stage, info)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another process was faster
            stage.rename(folder)
    return dataset


def _dataset(folder: Path, info: dict[str, Any]) -> FederatedDataset:
    train = _split(folder, "train")
    test = _split(folder, "test")
    names = tuple(info["class_names"]) or None
    dataset = FederatedDataset(folder.name, info["num_classes"], train, test, names)
    for level, text in info.get("notes", ()):  # caches of older versions have none
        log.log(level, text)
    return dataset


def _split(folder: Path, part: str) -> Split:
    """Maps the samples. Labels and groups are small and read in random order, so they are loaded
    into memory.
    """
    x = np.load(folder / f"{part}_x.npy", mmap_mode="r")
    y = np.load(folder / f"{part}_y.npy")
    groups = folder / f"{part}_groups.npy"
    return Split(x, y, np.load(groups) if groups.is_file() else None)
