"""Data sets with official archives: those of torchvision, by its own classes, and TinyImageNet, zipped or unpacked, or
any part of it in the same layout. Afterwards they are read from the cache.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.files import Keep, Origin, cached, described, obtain, rows_of, unpacked
from gcfed.data.sets.images import decode
from gcfed.utils.checked import SettingError, checked

CIFAR, EMNIST = "www.cs.toronto.edu/~kriz/cifar.html", "www.nist.gov/itl/products-and-services/emnist-dataset"
# name → torchvision's class, the official page, the class's further arguments
SETS: dict[str, tuple[str, str, dict[str, str]]] = {
    "cifar10": ("CIFAR10", CIFAR, {}),
    "cifar100": ("CIFAR100", CIFAR, {}),
    "mnist": ("MNIST", "ossci-datasets.s3.amazonaws.com/mnist/", {}),
    "fashion_mnist": ("FashionMNIST", "github.com/zalandoresearch/fashion-mnist", {}),
    "emnist_byclass": ("EMNIST", EMNIST, {"split": "byclass"}),
    "emnist_balanced": ("EMNIST", EMNIST, {"split": "balanced"}),
}

TINY = "tiny-imagenet-200"
ARCHIVE = f"{TINY}.zip"
URL = f"http://cs231n.stanford.edu/{ARCHIVE}"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


@checked
def torchvision_set(name: str, data_dir: str, download: bool = True) -> FederatedDataset:
    """One of :data:`SETS`: [n, 3, 32, 32] for CIFAR, [n, 1, 28, 28] for the MNIST family.

    EMNIST's images stay transposed, as its files and torchvision have them. Torchvision looks for its files in
    ``data_dir``, and with ``download`` gets its archives and unpacks them there.

    Raises ValueError for an unknown name, FileNotFoundError for missing or broken files.
    """
    if name not in SETS:
        raise SettingError("name", f"={name} is not one of {', '.join(SETS)}.")

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        splits = _load(name, Path(data_dir), download)
        for part, split in zip(("train", "test"), splits, strict=True):
            x = np.asarray(split.data)
            keep(part, x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2), np.asarray(split.targets, np.int64))
        return len(splits[0].classes), splits[0].classes

    return cached(data_dir, name, build)


def _load(name: str, folder: Path, download: bool) -> list[Any]:
    """Torchvision's set to train on, and the one to test on."""
    import torchvision.datasets  # seconds to import, and most runs read the cache

    class_name, page, options = SETS[name]
    place = getattr(getattr(torchvision.datasets, class_name), "base_folder", f"{class_name}/raw")
    trouble: Exception | None = None
    for attempt in (False, True)[: 1 + download]:
        try:
            cls = getattr(torchvision.datasets, class_name)
            found = [cls(folder, train=train, download=attempt, **options) for train in (True, False)]
            for split in found:
                if split.data.shape[1:] not in ((28, 28), (32, 32, 3)):  # the MNIST family's headers allow any
                    raise ValueError(f"images of the shape {[*split.data.shape]}")
            return found
        except (OSError, RuntimeError, ValueError, AssertionError, KeyError) as error:  # torchvision's, by format
            trouble = error
    what = f"a file in {place} is missing or broken ({trouble})"
    raise Origin(name, folder, f"https://{page}").missing(what, place, download) from trouble


def tiny_imagenet(data_dir: str, download: bool = True) -> FederatedDataset:
    """TinyImageNet, [n, 3, 64, 64]; its validation images are the test split, its classes the lines of ``wnids.txt``.

    Read from ``tiny-imagenet-200/`` in ``data_dir``, with whatever images are there, or else from the official
    ``tiny-imagenet-200.zip``, which need not be unpacked and is downloaded if it may be.

    Raises FileNotFoundError for missing pieces; ValueError for a wrong checksum, a broken image or an unknown class.
    """
    root, archive = Path(data_dir) / TINY, Path(data_dir) / ARCHIVE
    origin = Origin("tiny_imagenet", root.parent, URL)

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        if not root.is_dir():
            obtain(archive, MD5, [URL], origin, download)
        with unpacked(root, archive, URL) as folder:
            return _read_tiny(folder, origin, keep)

    return cached(data_dir, "tiny_imagenet", build, described(root, ("train/*/images", "val/images"), archive))


def _read_tiny(root: Path, origin: Origin, keep: Keep) -> tuple[int, list[str]]:
    tables = [root / name for name in ("wnids.txt", "words.txt", "val/val_annotations.txt")]
    origin.require(tables, ARCHIVE)
    wnids = [wnid for wnid, *_ in rows_of(tables[0], 1)]
    words = dict(row[:2] for row in rows_of(tables[1], 2, "\t"))
    test = [(root / "val/images" / file, wnid) for file, wnid, *_ in rows_of(tables[2], 2)]
    origin.require([path for path, _ in test], ARCHIVE)
    jpegs = [path for path in root.glob("train/*/images/[!.]*") if path.suffix.lower() in (".jpeg", ".jpg")]
    train = [(path, path.parts[-3]) for path in sorted(jpegs)]

    index = {wnid: i for i, wnid in enumerate(wnids)}
    if empty := sorted(index.keys() - {wnid for _, wnid in train}):
        raise origin.missing(f"{root / 'train'} has no image for {len(empty)} classes such as {empty[0]}", ARCHIVE)
    if unknown := sorted({wnid for _, wnid in (*train, *test)} - index.keys()):
        raise ValueError(f"data set tiny_imagenet: class {unknown[0]} is not in {tables[0]}")
    for part, samples in (("train", train), ("test", test)):
        images = decode([path for path, _ in samples], f"TinyImageNet {part}", side=64)
        keep(part, images, np.array([index[wnid] for _, wnid in samples]))
    return len(wnids), [words.get(wnid, wnid) for wnid in wnids]
