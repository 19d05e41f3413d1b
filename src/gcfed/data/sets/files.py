"""Raw files of a data set: found, checked, downloaded, unpacked. And the cache of what was decoded from them.

A set is decoded once. Its arrays lie in ``<data_dir>/cache/<name>/*.npy``, which every later run maps into memory. A
folder ``.build-*`` that no process works on was left by a killed build: delete it.
"""

import hashlib
import http.client
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torchvision.datasets.utils import check_integrity, download_url

from gcfed.data.base import FederatedDataset, Split

log = logging.getLogger(__name__)
TRAINS, TESTS = ("train", "training"), ("test", "testing", "val", "valid", "validation")
"""Names of folders, files and splits to train on, and to test on. Of several, the first is taken."""


@dataclass(frozen=True)
class Origin:
    """Where a set comes from, for errors: its name, the folder searched, its official page."""

    name: str
    folder: Path
    page: str

    def missing(self, trouble: str, file: str, download: bool = False) -> FileNotFoundError:
        """The error that names the trouble and the remedy; ``download``: it was tried, or is not possible."""
        remedy = "" if download else "run with data.dataset.download=true, or "
        return FileNotFoundError(
            f"data set {self.name}: {trouble} (searched {self.folder.resolve()}). To get it, {remedy}put {file} from "
            f"{self.page} there, or set paths.data_dir (DATA_DIR) to the folder that has it."
        )


def obtain(path: Path, md5: str, url: str, origin: Origin, download: bool) -> None:
    """Makes sure that ``path`` exists with its checksum. Downloads it if it may.

    Raises FileNotFoundError if it is missing or damaged and may not, or cannot, be downloaded.
    """
    if check_integrity(path, md5):
        return
    if not download:
        raise origin.missing(f"{path.name} is missing, or its md5 is not {md5}", path.name)
    try:
        download_url(url, path.parent, path.name, md5)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise origin.missing(f"{path.name} cannot be downloaded ({url}: {error})", path.name, download) from error


@contextmanager
def unpacked(folder: Path, archive: Path) -> Iterator[Path]:
    """The folder, or, where it is absent, its archive, unpacked for as long as it is read."""
    if folder.is_dir():
        yield folder
        return
    with TemporaryDirectory(prefix=".unpack-", dir=archive.parent) as stage:
        shutil.unpack_archive(archive, stage, filter=None if archive.suffix == ".zip" else "data")
        yield Path(stage) / folder.name


def described(folder: Path, parts: Sequence[str], archive: Path) -> str:
    """What would be read, at little cost: the number of images, or the archive's size. Empty without either.

    ``parts``: patterns of the folders of images to train on and to test on.
    """
    if folder.is_dir():
        counts = [sum(1 for place in folder.glob(part) for _ in os.scandir(place)) for part in parts]
        return f"{folder.name}/ with {counts[0]} training and {counts[1]} test images"
    return f"{archive.name} of {archive.stat().st_size} bytes" if archive.is_file() else ""


def written(files: Sequence[Path]) -> str:
    """Names, sizes and times of files: a cache is built again when one was changed, moved, added or removed."""
    about = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{len(about)} files, {hashlib.sha256(repr(about).encode()).hexdigest()}"


def listing(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *["…"] * (len(names) > 5)]) or "nothing"


def rows_of(path: Path, columns: int, separator: str | None = None) -> list[list[str]]:
    """The cells of each line, split at white space or the separator.

    Raises ValueError if there is no line, or one with fewer columns.
    """
    rows = [line.split(separator) for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    if not rows or min(map(len, rows)) < columns:
        raise ValueError(f"{path} is empty or damaged: take the official one.")
    return rows


# ------------------------------------------------------------------------------------------------------ the cache
MANIFEST = "manifest.json"

Keep = Callable[..., None]
"""``keep("train", x, y, groups)``: the samples of a part, or an iterator over blocks of them; labels; groups."""
Build = Callable[[Keep], tuple[int, Sequence[str]]]
"""Keeps ``train`` and ``test``. Returns the number of classes, and their names."""


def cached(data_dir: str | Path, name: str, build: Build, source: str = "") -> FederatedDataset:
    """The set ``name`` from its cache, which is built first if need be.

    ``source`` describes raw files that have no checksum: a cache of another source is built again. An empty ``source``
    (raw files deleted, or fixed by a checksum) accepts any cache.

    Raises what ``build`` raises; ValueError for samples and labels that do not fit together; OSError if the cache
    cannot be written.
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
    with TemporaryDirectory(prefix=".build-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        stage = Path(scratch) / name
        stage.mkdir()
        num_classes, names = build(partial(_write, stage))
        info = {"num_classes": num_classes, "class_names": [*names]}
        (stage / MANIFEST).write_text(json.dumps({"source": source, "info": info}))
        dataset = _dataset(stage, info)  # maps its own files: another process may replace the folder at any time
        with suppress(FileNotFoundError):
            folder.rename(Path(scratch) / "old")
        try:
            stage.rename(folder)
        except OSError:
            if not (folder / MANIFEST).is_file():  # else another process was faster
                raise
    return dataset


def _write(folder: Path, part: str, x: Any, y: np.ndarray, groups: np.ndarray | None = None) -> None:
    blocks, end = [x] if isinstance(x, np.ndarray) else x, 0
    for block in blocks:
        if end == 0:
            shape = (len(y), *block.shape[1:])
            if math.prod(shape) * block.itemsize > shutil.disk_usage(folder).free:  # else: killed by a signal
                raise OSError(f"{folder}: the disk has no room for {part}_x; set paths.data_dir")
            out = np.lib.format.open_memmap(folder / f"{part}_x.npy", mode="w+", dtype=block.dtype, shape=shape)
        out[end : end + len(block)] = block
        end += len(block)
    out.flush()
    np.save(folder / f"{part}_y.npy", y)
    if groups is not None:
        np.save(folder / f"{part}_groups.npy", groups)


def _dataset(folder: Path, info: dict[str, Any]) -> FederatedDataset:
    def split(part: str) -> Split:
        # Labels and groups are small and read at random: into memory. Images stay on disk until somebody asks.
        y, groups = (folder / f"{part}_{kind}.npy" for kind in ("y", "groups"))
        x = np.load(folder / f"{part}_x.npy", mmap_mode="r")
        return Split(x, np.load(y), np.load(groups) if groups.is_file() else None)

    names = tuple(info.get("class_names") or ())
    return FederatedDataset(folder.name, info["num_classes"], split("train"), split("test"), names or None)
