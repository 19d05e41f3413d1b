"""Decode a set once: its arrays lie in ``<data_dir>/cache/<name>/*.npy`` and are memory-mapped by every later run.

Arrays are written beside their final name and moved into place, the manifest last: without a manifest that has their
checksums there is no cache. Two processes that build at once both succeed, since each hands out the files that it wrote
itself. A folder ``.build-*`` that no process is at work on was left by a killed build: delete it.
"""

import json
import logging
import math
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.utils.files import replacing

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"

Allocate = Callable[[str, tuple[int, ...]], np.ndarray]
"""``allocate("train", shape)``: zeroed uint8 samples of a part, on the disk, for memory might not hold them."""

Raw = tuple[Mapping[str, Sequence[np.ndarray | None]], int, Sequence[str]]
"""x, y and perhaps groups of the parts ``train`` and ``test``; the number of classes; their names, if there are any."""


def cached(data_dir: str | Path, name: str, build: Callable[[Allocate], Raw], source: str = "") -> FederatedDataset:
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
        checksums = manifest.get("crc32", {})  # caches of before have none
        arrays = {key: _open(folder / f"{key}.npy", checksums.get(key)) for key in manifest["arrays"]}
        return _dataset(folder.name, arrays, manifest["info"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("Building the cache %s again: %s", folder, error)
        return None


def _open(path: Path, checksum: int | None = None) -> np.ndarray:
    if checksum is not None and _checksum(path) != checksum:
        raise ValueError(f"{path.name} has the wrong checksum")
    return np.load(path, mmap_mode="r")


def _checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, mode="r").data)  # 3 GB a second


def _build(folder: Path, scratch: Path, build: Callable[[Allocate], Raw], source: str) -> FederatedDataset:
    def allocate(part: str, shape: tuple[int, ...]) -> np.ndarray:
        # A memory map on a full disk dies by a signal; this dies with a reason.
        size, free = math.prod(shape), shutil.disk_usage(scratch).free
        if size > free:
            raise OSError(f"{folder}: {part}_x needs {size:,} bytes and the disk has {free:,} left; set paths.data_dir")
        return np.lib.format.open_memmap(scratch / f"{part}_x.npy", mode="w+", dtype=np.uint8, shape=shape)

    parts, num_classes, names = build(allocate)
    for part, arrays in parts.items():
        for kind, array in zip(("x", "y", "groups"), arrays, strict=False):
            path = scratch / f"{part}_{kind}.npy"
            if path.exists():
                array.flush()  # type: ignore[union-attr]
            elif array is not None:
                np.save(path, np.ascontiguousarray(array))
    checksums = {path.stem: _checksum(path) for path in sorted(scratch.glob("*.npy"))}
    info = {"num_classes": num_classes, "class_names": [*names]}
    try:
        # Opened before they move: should another process replace them next, these maps keep this build's files.
        dataset = _dataset(folder.name, {key: _open(scratch / f"{key}.npy") for key in checksums}, info)
    except ValueError as error:  # and nothing is kept of it
        raise ValueError(f"{error}: get the files of {folder.name} in {folder.parents[1]} anew.") from error
    (folder / MANIFEST).unlink(missing_ok=True)
    for key in checksums:
        (scratch / f"{key}.npy").replace(folder / f"{key}.npy")
    manifest = {"format": FORMAT, "source": source, "info": info, "arrays": [*checksums], "crc32": checksums}
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest))
    return dataset


def _dataset(name: str, arrays: dict[str, np.ndarray], info: dict[str, Any]) -> FederatedDataset:
    def split(part: str) -> Split:
        # Labels and groups are small and read at random: into memory. Images stay on disk until somebody asks.
        small = {key: np.array(arrays[f"{part}_{key}"]) for key in ("y", "groups") if f"{part}_{key}" in arrays}
        return Split(arrays[f"{part}_x"], **small)

    names = tuple(info.get("class_names") or ())
    return FederatedDataset(name, info["num_classes"], split("train"), split("test"), names or None)
