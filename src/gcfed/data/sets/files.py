"""Raw files of a data set: found, checked, downloaded, unpacked. And the cache of what was decoded from them.

A set is decoded once. Its arrays lie in ``<data_dir>/cache/<name>/*.npy``, which every later run maps into memory. They
are written to a folder ``.build-*``, then moved; the manifest with their checksums comes last, and without it there is
no cache. Two processes that build at once both succeed: each returns the files that it wrote itself. A ``.build-*``
that no process works on was left by a killed build: delete it. No raw file is ever deleted.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import math
import os
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

    def require(self, paths: Sequence[Path], file: str) -> None:
        """Raises FileNotFoundError where some of these are not there."""
        if absent := [path for path in paths if not path.is_file()]:
            raise self.missing(f"{absent[0]} is missing", file, download=True)


def obtain(path: Path, md5: str, urls: Sequence[str], origin: Origin, download: bool) -> None:
    """Makes sure that ``path`` exists with its checksum: downloads it from the first of ``urls`` that serves it.

    A download gets its name when it is complete and right, so that neither a kill nor a second process spoils it.

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
    """The folder, or, where it is absent, its archive, unpacked for as long as it is read.

    Raises ValueError for an archive that cannot be read.
    """
    if folder.is_dir():
        yield folder
        return
    with TemporaryDirectory(prefix=".unpack-", dir=archive.parent) as stage:
        try:
            shutil.unpack_archive(archive, stage, filter=None if archive.suffix == ".zip" else "data")
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise ValueError(f"{archive} cannot be read ({error}): get it anew from {page}.") from error
        try:
            yield Path(stage) / folder.name
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(str(error).replace(stage, str(archive))) from error


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
FORMAT = 1
MANIFEST = "manifest.json"

Keep = Callable[..., None]
"""``keep("train", x, y, groups)``: the samples of a part, or an iterator over blocks of them; labels; groups."""
Build = Callable[[Keep], tuple[int, Sequence[str]] | tuple[int, Sequence[str], str]]
"""Keeps ``train`` and ``test``. Returns the number of classes, their names, and a note to log at each reading."""


def cached(data_dir: str | Path, name: str, build: Build, source: str = "") -> FederatedDataset:
    """The set ``name`` from its cache, which is built first if need be.

    ``source`` describes raw files that have no checksum: a cache of another source is built again. An empty ``source``
    (raw files deleted, or fixed by a checksum) accepts any cache.

    Raises what ``build`` raises; ValueError for samples and labels that do not fit together; OSError if the cache
    cannot be written.
    """
    folder = Path(data_dir) / "cache" / name
    found = _read(folder, source)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
            found = _build(folder, Path(scratch), build, source)
    return found


def _read(folder: Path, source: str) -> FederatedDataset | None:
    """The data set of a sound cache; None, after a warning, for one that must be built again."""
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
                shape = (count, *block.shape[1:])
                if math.prod(shape) * block.itemsize > shutil.disk_usage(scratch).free:  # else: killed by a signal
                    raise OSError(f"{folder}: the disk has no room for {part}_x; set paths.data_dir")
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
    # Opened before they move: should another process replace them next, these maps keep this build's files.
    dataset = _dataset(folder.name, scratch, checksums, info)
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
