"""From the raw files of a set, checked, fetched, unpacked, decoded, and named where something is wrong, to its cache.

A set is decoded once: its arrays lie in ``<data_dir>/cache/<name>/*.npy``, memory-mapped by every later run. They are
written beside their final name and moved into place, the manifest last: without a manifest that has their checksums
there is no cache. Two processes that build at once both succeed, since each hands out the files that it wrote itself.
A folder ``.build-*`` that no process is at work on was left by a killed build: delete it. No raw file is ever deleted.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import math
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.utils.files import replacing

log = logging.getLogger(__name__)
TRAINS, TESTS = ("train", "training"), ("test", "testing", "val", "valid", "validation")
"""Names of folders, files and splits to train on, and of those to test on; of several the first."""


@dataclass(frozen=True)
class Origin:
    """Where a set comes from, for the errors about it: its name, the folder searched, its official page."""

    name: str
    folder: Path
    page: str

    def missing(self, trouble: str, file: str, download: bool = False) -> FileNotFoundError:
        """The error that names the trouble and the way out; ``download``: whether it was tried, or cannot be."""
        remedy = "" if download else "run with data.dataset.download=true, or "
        return FileNotFoundError(
            f"data set {self.name}: {trouble} (searched {self.folder.resolve()}). To get it, {remedy}put {file} from "
            f"{self.page} there, or set paths.data_dir (DATA_DIR) to the folder that has it."
        )

    def require(self, paths: Sequence[Path], file: str) -> None:
        """Raises FileNotFoundError where some of these are not there."""
        if absent := [path for path in paths if not path.is_file()]:
            more = f", and {len(absent) - 1:,} more" * (len(absent) > 1)
            raise self.missing(f"{absent[0]} is missing{more}", file, download=True)


def obtain(path: Path, md5: str, urls: Sequence[str], origin: Origin, download: bool) -> None:
    """See that ``path`` is there with its checksum, downloading it from the first of ``urls`` that serves it.

    A download becomes visible when it is complete and right, so that neither a kill nor a second process spoils it.

    Raises FileNotFoundError if it is missing and may not, or cannot, be downloaded; ValueError for a wrong checksum.
    """
    if path.is_file():
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != md5:
            raise ValueError(
                f"data set {origin.name}: {path} has the wrong checksum (md5 {found} instead of {md5}), perhaps from a "
                "download cut short: move it away, then run with data.dataset.download=true"
            )
        return
    if not download:
        raise origin.missing(f"{path.name} is missing", path.name)

    from torchvision.datasets.utils import download_url  # seconds to import, and most runs read the cache

    path.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    with TemporaryDirectory(prefix=".download-", dir=path.parent) as stage:
        for url in urls:
            try:
                download_url(url, stage, path.name, md5)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                failures.append(f"{url}: {error}")
            else:
                (Path(stage) / path.name).replace(path)
                return
    raise origin.missing(f"{path.name} could not be downloaded ({'; '.join(failures)})", path.name, download=True)


@contextmanager
def unpacked(folder: Path, archive: Path, page: str) -> Iterator[Path]:
    """The folder, or where it is not there its archive, which holds it, unpacked for as long as it is read.

    Raises ValueError for an archive that cannot be read.
    """
    if folder.is_dir():
        yield folder
        return
    with TemporaryDirectory(prefix=".unpack-", dir=archive.parent) as stage:
        safely = {} if archive.suffix == ".zip" else {"filter": "data"}
        try:
            shutil.unpack_archive(archive, stage, **safely)  # type: ignore[arg-type]
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise ValueError(f"{archive} cannot be read ({error}): get it anew from {page}.") from error
        try:
            yield Path(stage) / folder.name
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(str(error).replace(stage, str(archive))) from error


def described(folder: Path, parts: Sequence[str], archive: Path) -> str:
    """What would be read, told cheaply: a part of the images may give way to all of them, or an archive to another.

    Empty without either. ``parts``: patterns of the folders of images to train on and to test on.
    """
    if folder.is_dir():
        counts = [sum(1 for place in folder.glob(part) for _ in os.scandir(place)) for part in parts]
        return f"{folder.name}/ with {counts[0]} training and {counts[1]} test images"
    return f"{archive.name} of {archive.stat().st_size} bytes" if archive.is_file() else ""


def written(files: Sequence[Path]) -> str:
    """What a cache was made of: it is made anew where a file was changed, moved, added or taken away."""
    about = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{len(about)} files, {hashlib.sha256(repr(about).encode()).hexdigest()}"


def listing(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *["…"] * (len(names) > 5)]) or "nothing"


def rows_of(path: Path, columns: int, separator: str | None = None) -> list[list[str]]:
    """The columns of each line of a table, split at white space or the separator.

    Raises ValueError where there is no line, or one with fewer columns.
    """
    try:
        rows = [line.split(separator) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        rows = [[]]
    if not rows or min(map(len, rows)) < columns:
        raise ValueError(f"{path} is empty or damaged: take the official one.")
    return rows


def is_plain(name: object) -> bool:
    """Whether it is a file's bare name, which cannot lead out of its folder."""
    return isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*", name) is not None


# ------------------------------------------------------------------------------------------------------ the cache
FORMAT = 1
MANIFEST = "manifest.json"

Keep = Callable[..., None]
"""``keep("train", x, y, groups)``: a part's samples, or blocks of them, which memory need not hold; labels; groups."""
Build = Callable[[Keep], tuple[int, Sequence[str]] | tuple[int, Sequence[str], str]]
"""Keeps ``train`` and ``test``, and returns the number of classes and their names, if there are any; and perhaps a
line to be logged, now and when the cache is read.
"""


def cached(data_dir: str | Path, name: str, build: Build, source: str = "") -> FederatedDataset:
    """The set ``name`` from its cache, or built there first.

    ``source`` describes the raw files where their content is not fixed by a checksum; a cache of another source is
    built anew. An empty one (raw files gone, or fixed) accepts what is there.

    Raises what ``build`` raises; ValueError for samples and labels that do not fit together; OSError when the cache
    cannot be written.
    """
    folder = Path(data_dir) / "cache" / name
    if (found := _read(folder, source)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stage = TemporaryDirectory(prefix=".build-", dir=folder)
    except OSError as error:
        error.add_note(f"The decoded data are kept in {folder}: make it writable, or set paths.data_dir (DATA_DIR).")
        raise
    with stage as scratch:
        return _build(folder, Path(scratch), build, source)


def _read(folder: Path, source: str) -> FederatedDataset | None:
    """What a sound cache holds; None, and why, for one that must be built (again)."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"it has format {manifest['format']}, not {FORMAT}")
        if source and manifest["source"] != source:
            raise ValueError(f"it was made from {manifest['source']!r}, and the raw files are now {source!r}")
        for key, checksum in manifest["crc32"].items():
            if _checksum(folder / f"{key}.npy") != checksum:
                raise ValueError(f"{key}.npy has the wrong checksum")
        return _dataset(folder.name, folder, manifest["crc32"], manifest["info"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("Building the cache %s again: %s", folder, error)
        return None


def _checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, mode="r").data)  # 3 GB a second


def _build(folder: Path, scratch: Path, build: Build, source: str) -> FederatedDataset:
    def keep(part: str, x: Any, y: np.ndarray, groups: np.ndarray | None = None) -> None:
        blocks, count = ([x], len(x)) if isinstance(x, np.ndarray) else (x, len(y))
        end = 0
        for block in blocks:
            if end == 0:
                # A memory map on a full disk dies by a signal; this dies with a reason.
                shape, free = (count, *block.shape[1:]), shutil.disk_usage(scratch).free
                if (size := math.prod(shape) * block.itemsize) > free:
                    needed = f"{part}_x needs {size:,} bytes and the disk has {free:,} left; set paths.data_dir"
                    raise OSError(f"{folder}: {needed}")
                out = np.lib.format.open_memmap(scratch / f"{part}_x.npy", mode="w+", dtype=block.dtype, shape=shape)
            out[end : end + len(block)] = block
            end += len(block)
        out.flush()
        for kind, array in (("y", y), ("groups", groups)):
            if array is not None:
                np.save(scratch / f"{part}_{kind}.npy", array)

    num_classes, names, *notes = build(keep)
    checksums = {path.stem: _checksum(path) for path in sorted(scratch.glob("*.npy"))}
    info = {"num_classes": num_classes, "class_names": [*names], "notes": [note for note in notes if note]}
    try:
        # Opened before they move: should another process replace them next, these maps keep this build's files.
        dataset = _dataset(folder.name, scratch, checksums, info)
    except ValueError as error:  # and nothing is kept of it
        raise ValueError(f"{error}: get the files of {folder.name} in {folder.parents[1]} anew.") from error
    (folder / MANIFEST).unlink(missing_ok=True)
    for key in checksums:
        (scratch / f"{key}.npy").replace(folder / f"{key}.npy")
    manifest = {"format": FORMAT, "source": source, "info": info, "crc32": checksums}
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest))
    return dataset


def _dataset(name: str, folder: Path, keys: Collection[str], info: dict[str, Any]) -> FederatedDataset:
    def split(part: str) -> Split:
        # Labels and groups are small and read at random: into memory. Images stay on disk until somebody asks.
        small = {key: np.load(folder / f"{part}_{key}.npy") for key in ("y", "groups") if f"{part}_{key}" in keys}
        return Split(np.load(folder / f"{part}_x.npy", mmap_mode="r"), **small)

    for note in info.get("notes", ()):
        log.warning(note)
    names = tuple(info.get("class_names") or ())
    return FederatedDataset(name, info["num_classes"], split("train"), split("test"), names or None)
