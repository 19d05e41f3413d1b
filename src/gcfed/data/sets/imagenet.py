"""TinyImageNet from its official archive, zipped or unpacked, or from any part of it in the same layout."""

from functools import partial
from pathlib import Path

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import Allocate, Raw, cached
from gcfed.data.sets.files import Origin, decode, described, obtain, read_images, unpacked

FOLDER = "tiny-imagenet-200"
ARCHIVE = f"{FOLDER}.zip"
URL = f"http://cs231n.stanford.edu/{ARCHIVE}"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
SIZE = 64


def tiny_imagenet(data_dir: str, download: bool = True) -> FederatedDataset:
    """TinyImageNet, [n, 3, 64, 64]; its validation images are the test split, its classes the lines of ``wnids.txt``.

    Read from ``tiny-imagenet-200/`` in ``data_dir``, with whatever images are there, or else from the official
    ``tiny-imagenet-200.zip``, which need not be unpacked and is downloaded if it may be.

    Raises FileNotFoundError for missing pieces; ValueError for a wrong checksum, a broken image or an unknown class.
    """
    root, archive = Path(data_dir) / FOLDER, Path(data_dir) / ARCHIVE
    origin = Origin("tiny_imagenet", root.parent, URL)

    def build(allocate: Allocate) -> Raw:
        if not root.is_dir():
            obtain(archive, MD5, [URL], origin, download)
        with unpacked(root, archive, URL) as folder:
            return _read(folder, origin, allocate)

    return cached(data_dir, "tiny_imagenet", build, described(root, ("train/*/images", "val/images"), archive))


def _read(root: Path, origin: Origin, allocate: Allocate) -> Raw:
    tables = [root / name for name in ("wnids.txt", "words.txt", "val/val_annotations.txt")]
    origin.require(tables, ARCHIVE)
    wnids = [wnid for wnid, *_ in _rows(tables[0], 1)]
    words = dict(row[:2] for row in _rows(tables[1], 2, "\t"))
    test = [(root / "val/images" / file, wnid) for file, wnid, *_ in _rows(tables[2], 2)]
    origin.require([path for path, _ in test], ARCHIVE)
    jpegs = [path for path in root.glob("train/*/images/[!.]*") if path.suffix.lower() in (".jpeg", ".jpg")]
    train = [(path, path.parts[-3]) for path in sorted(jpegs)]

    index = {wnid: i for i, wnid in enumerate(wnids)}
    if len(index) < len(wnids):
        raise ValueError(f"data set tiny_imagenet: {tables[0]} names a class twice: take the official one.")
    if empty := sorted(index.keys() - {wnid for _, wnid in train}):
        raise origin.missing(f"{root / 'train'} has no image for {len(empty)} classes such as {empty[0]}", ARCHIVE)
    if unknown := sorted({wnid for _, wnid in (*train, *test)} - index.keys()):
        raise ValueError(f"data set tiny_imagenet: class {unknown[0]} is not in {tables[0]}")
    parts = {}
    for part, samples in (("train", train), ("test", test)):
        images = read_images((path for path, _ in samples), SIZE)
        x = decode(images, len(samples), f"TinyImageNet {part}", room=partial(allocate, part))
        parts[part] = x, np.array([index[wnid] for _, wnid in samples])
    return parts, len(wnids), [words.get(wnid, wnid) for wnid in wnids]


def _rows(path: Path, columns: int, separator: str | None = None) -> list[list[str]]:
    """The columns of each line of a table, split at white space or the separator; at least so many."""
    try:
        rows = [line.split(separator) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        rows = [[]]
    if not rows or min(map(len, rows)) < columns:
        raise ValueError(f"data set tiny_imagenet: {path} is empty or damaged: take the official one.")
    return rows
