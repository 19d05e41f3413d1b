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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset, Split

log = logging.getLogger(__name__)
TRAINS, TESTS = ("train", "training"), ("test", "testing", "val", "valid", "validation")
"""Names of folders, files and splits for training and for testing.

If several exist, the first of them is used.
"""


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
    counts = [
        sum(1 for place in folder.glob(pattern) for _ in os.scandir(place)) for pattern in patterns
    ]
    return f"{counts} files" if folder.is_dir() else ""


def written(files: Sequence[Path]) -> str:
    """A hash of the files' names, sizes and times, as a ``source`` of :func:`cached`."""
    about = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{len(about)} files, {hashlib.sha256(repr(about).encode()).hexdigest()}"


def listing(names: Sequence[str]) -> str:
    """The first five names, for a message."""
    return ", ".join([*names[:5], *["…"] * (len(names) > 5)]) or "nothing"


def rows_of(path: Path, columns: int, separator: str | None = None) -> list[list[str]]:
    """The cells of each line, split at white space or the separator.

    Raises ValueError if a line has fewer columns.
    """
    rows = [
        line.split(separator)
        for line in path.read_text("utf-8", "replace").splitlines()
        if line.strip()
    ]
    if not rows or min(map(len, rows)) < columns:
        raise ValueError(f"{path} is empty or damaged: take the official one.")
    return rows


# ---------------------------------------------------------------------------------------- the cache
MANIFEST = "manifest.json"

Keep = Callable[..., None]
"""``keep("train", x, y, groups)`` writes a split.

``x`` is an array, or an iterator over blocks of samples.
"""
Build = Callable[[Keep], tuple[int, Sequence[str]]]
"""Keeps the splits ``train`` and ``test``. Returns the number of classes and their names."""


def cached(data_dir: str | Path, name: str, build: Build, source: str = "") -> FederatedDataset:
    """The data set ``name`` from its cache.

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
        num_classes, names = build(partial(_write, stage))
        info = {"num_classes": num_classes, "class_names": [*names]}
        (stage / MANIFEST).write_text(json.dumps({"source": source, "info": info}))
        # maps its own files: another process may replace the folder at any time
        dataset = _dataset(stage, info)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another process was faster
            stage.rename(folder)
    return dataset


def _write(
    folder: Path, part: str, x: Any, y: np.ndarray, groups: np.ndarray | None = None
) -> None:
    end = 0
    for block in [x] if isinstance(x, np.ndarray) else x:
        if end == 0:
            shape, path = (len(y), *block.shape[1:]), folder / f"{part}_x.npy"
            out = np.lib.format.open_memmap(path, mode="w+", dtype=block.dtype, shape=shape)
        out[end : end + len(block)] = block
        end += len(block)
    np.save(folder / f"{part}_y.npy", y)
    if groups is not None:
        np.save(folder / f"{part}_groups.npy", groups)


def _dataset(folder: Path, info: dict[str, Any]) -> FederatedDataset:
    def split(part: str) -> Split:
        # Labels and groups are small and read in random order, so they are loaded into memory.
        # Images are mapped.
        y, groups = (folder / f"{part}_{kind}.npy" for kind in ("y", "groups"))
        x = np.load(folder / f"{part}_x.npy", mmap_mode="r")
        return Split(x, np.load(y), np.load(groups) if groups.is_file() else None)

    names = tuple(info["class_names"]) or None
    return FederatedDataset(folder.name, info["num_classes"], split("train"), split("test"), names)
