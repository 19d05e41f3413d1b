"""TinyImageNet from its official archive, zipped or unpacked, or from any part of it in the same layout."""

import os
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import Allocate, cached
from gcfed.data.sets.files import Origin, decode, obtain, read_image

FOLDER = "tiny-imagenet-200"
ARCHIVE = f"{FOLDER}.zip"
URL = f"http://cs231n.stanford.edu/{ARCHIVE}"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
SIZE = 64

Read = Callable[[str], bytes]


def tiny_imagenet(data_dir: str, download: bool = True) -> FederatedDataset:
    """TinyImageNet, [n, 3, 64, 64]; its validation images are the test split, its classes the lines of ``wnids.txt``.

    Read from ``tiny-imagenet-200/`` in ``data_dir``, with whatever images are there, or else from the official
    ``tiny-imagenet-200.zip``, which need not be unpacked and is downloaded if it may be.

    Raises FileNotFoundError for missing pieces; ValueError for a wrong checksum, a broken image or an unknown class.
    """
    folder = Path(data_dir)
    return cached(data_dir, "tiny_imagenet", lambda allocate: _decode(folder, download, allocate), _describe(folder))


def _describe(folder: Path) -> str:
    """What would be read, told cheaply: a folder with a part of the images may be replaced by one with all of them."""
    if (folder / FOLDER).is_dir():
        train = sum(1 for images in (folder / FOLDER / "train").glob("*/images") for _ in os.scandir(images))
        val = sum(1 for _ in (folder / FOLDER / "val" / "images").glob("*"))
        return f"{FOLDER}/ with {train} training and {val} validation images"
    return ARCHIVE if (folder / ARCHIVE).exists() else ""


def _decode(folder: Path, download: bool, allocate: Allocate) -> dict[str, Any]:
    origin = Origin("tiny_imagenet", folder, URL)
    with _open(folder, download, origin) as (names, read):
        absent = {"wnids.txt", "words.txt", "val/val_annotations.txt"}.difference(names)
        if absent:
            raise FileNotFoundError(origin.advice(f"{FOLDER}/ lacks {', '.join(sorted(absent))}", ARCHIVE))
        wnids = [wnid for wnid, *_ in _rows(read, "wnids.txt", 1)]
        index = {wnid: i for i, wnid in enumerate(wnids)}
        if len(index) < len(wnids):
            raise ValueError(f"data set tiny_imagenet: {FOLDER}/wnids.txt names a class twice: take the official one.")
        images = [name for name in names if re.fullmatch(r".*/images/[^./][^/]*\.jpe?g", name, re.IGNORECASE)]
        train = [(name, name.split("/")[1]) for name in images if name.startswith("train/")]
        val = [(f"val/images/{file}", wnid) for file, wnid, *_ in _rows(read, "val/val_annotations.txt", 2)]
        words = dict(row[:2] for row in _rows(read, "words.txt", 2, "\t"))

        if missing := sorted({name for name, _ in val}.difference(images)):
            raise FileNotFoundError(
                origin.advice(f"{FOLDER}/ lacks {len(missing)} validation images such as {missing[0]}", ARCHIVE)
            )
        if empty := [wnid for wnid in wnids if wnid not in {wnid for _, wnid in train}]:
            raise FileNotFoundError(
                origin.advice(f"{FOLDER}/train/ has no image for {len(empty)} classes such as {empty[0]}", ARCHIVE)
            )
        if unknown := sorted({wnid for _, wnid in (*train, *val)}.difference(index)):
            raise ValueError(f"data set tiny_imagenet: class {unknown[0]} is not in {FOLDER}/wnids.txt")
        for part, samples in (("train", train), ("test", val)):
            allocate(f"{part}_y", (len(samples),), np.int64)[:] = [index[wnid] for _, wnid in samples]
            named = ((f"data set tiny_imagenet: {FOLDER}/{name}", read(name)) for name, _ in samples)
            pictures = ((name, read_image(content, name, (SIZE, SIZE))) for name, content in named)
            decode(pictures, len(samples), f"TinyImageNet {part}", allocate=partial(allocate, f"{part}_x"))
    return {"num_classes": len(wnids), "class_names": [words.get(wnid, wnid) for wnid in wnids]}


@contextmanager
def _open(folder: Path, download: bool, origin: Origin) -> Iterator[tuple[list[str], Read]]:
    """Names under ``tiny-imagenet-200/``, sorted, and how to read one."""
    root = folder / FOLDER
    if root.is_dir():
        paths = (Path(parent) / file for parent, _, files in os.walk(root) for file in files)
        yield sorted(path.relative_to(root).as_posix() for path in paths), lambda name: (root / name).read_bytes()
    else:
        obtain(folder / ARCHIVE, MD5, [URL], origin, download)
        with zipfile.ZipFile(folder / ARCHIVE) as archive:
            names = [name.removeprefix(f"{FOLDER}/") for name in archive.namelist() if not name.endswith("/")]
            yield sorted(names), lambda name: archive.read(f"{FOLDER}/{name}")


def _rows(read: Read, name: str, columns: int, separator: str | None = None) -> list[list[str]]:
    """The columns of each line of a table, split at white space or the separator; at least so many."""
    try:
        rows = [line.split(separator) for line in read(name).decode().splitlines() if line.strip()]
    except UnicodeDecodeError:
        rows = [[]]
    if not rows or min(map(len, rows)) < columns:
        raise ValueError(f"data set tiny_imagenet: {FOLDER}/{name} is empty or damaged: take the official one.")
    return rows
