"""The cache of the arrays that were decoded from raw files.

A data set is decoded once, into ``<data_dir>/cache/<name>/*.npy``. Later runs map these files into
memory. A killed build may leave a folder ``.build-*``, which can be deleted.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy import ndarray

from gcfed.data.base import FederatedDataset, Split
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"


class SplitWriter:
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
        x: ndarray | Iterable[ndarray],
        y: ndarray,
        groups: ndarray | None = None,
    ) -> None:
        """Writes one split.

        Args:
            part: ``train`` or ``test``.
            x: the samples [n, …], or blocks of them.
            y: their labels [n, …].
            groups: their natural clients [n].

        Raises Refusal if the numbers of samples and labels differ.
        """
        blocks = [x] if isinstance(x, ndarray) else x
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


Build = Callable[[SplitWriter], tuple[int, Sequence[str]]]
"""Keeps the splits ``train`` and ``test``. Returns the number of classes and their names."""


def cache_name(kind: str, settings: object) -> str:
    """The name of a cache that depends on settings."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    return f"{kind}_{digest[:12]}"


def cached(data_dir: str | Path, name: str, build: Build, source: str = "") -> FederatedDataset:
    """The data set ``name`` from its cache, and the notes of its build in the log.

    Builds the cache first if it is missing, damaged or of another source.

    ``source`` identifies the raw files. Empty: any cache will do, because the raw files have
    checksums or were deleted.

    Raises what ``build`` raises; Refusal for samples and labels that do not match; OSError if it
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
        keep = SplitWriter(stage)
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
    for level, text in info["notes"]:
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
