"""Data sets of images with official archives: torchvision's, read by its own classes, and TinyImageNet."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.files import Keep, cached, counted, missing, obtain, rows_of
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

    EMNIST's images stay transposed, as in its files and in torchvision. Torchvision looks for its files in
    ``data_dir``, and with ``download`` puts them there.

    Raises ValueError for an unknown name, FileNotFoundError for missing or broken files.
    """
    if name not in SETS:
        raise SettingError("name", f"={name} is not one of {', '.join(SETS)}.")

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        class_name, page, options = SETS[name]
        for part in ("train", "test"):
            split = published(name, class_name, Path(data_dir), page, download, train=part == "train", **options)
            x = np.asarray(split.data)
            keep(part, x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2), np.asarray(split.targets, np.int64))
        return len(split.classes), split.classes

    return cached(data_dir, name, build)


def published(name: str, class_name: str, folder: Path, page: str, download: bool, **options: Any) -> Any:
    """The data set that a class of torchvision reads. Raises FileNotFoundError for missing or broken files."""
    import torchvision.datasets  # it imports the compiler

    try:
        return getattr(torchvision.datasets, class_name)(folder, download=download, **options)
    except (OSError, EOFError, RuntimeError, ValueError, AssertionError, KeyError, IndexError) as error:  # by format
        raise missing(name, folder, f"a file is missing or broken ({error})", page) from error


def tiny_imagenet(data_dir: str, download: bool = True) -> FederatedDataset:
    """TinyImageNet, [n, 3, 64, 64]. The test split is the validation images; classes have the order of ``wnids.txt``.

    Reads the folder ``tiny-imagenet-200/`` in ``data_dir``, which may hold a part of the images. If it is missing, the
    official ``tiny-imagenet-200.zip`` is unpacked there, and downloaded first if ``download`` is set.

    Raises FileNotFoundError for missing files; ValueError for a broken image or an unknown class.
    """
    root, archive = Path(data_dir) / TINY, Path(data_dir) / ARCHIVE

    def unpack() -> None:
        obtain(archive, MD5, URL, "tiny_imagenet", download)
        with TemporaryDirectory(prefix=".unpack-", dir=data_dir) as stage:
            shutil.unpack_archive(archive, stage)
            try:
                (Path(stage) / TINY).rename(root)  # a killed run leaves no part of it
            except OSError:
                if not root.is_dir():  # else another process was faster
                    raise

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        if not root.is_dir():  # the cache is damaged, and the images were deleted
            unpack()
        return _read_tiny(root, keep)

    if not root.is_dir() and not (Path(data_dir) / "cache/tiny_imagenet").is_dir():
        unpack()  # before the images are counted
    return cached(data_dir, "tiny_imagenet", build, counted(root, "train/*/images", "val/images"))


def _read_tiny(root: Path, keep: Keep) -> tuple[int, list[str]]:
    wnids = [wnid for wnid, *_ in rows_of(root / "wnids.txt", 1)]
    words = dict(row[:2] for row in rows_of(root / "words.txt", 2, "\t"))
    test = [(root / "val/images" / file, wnid) for file, wnid, *_ in rows_of(root / "val/val_annotations.txt", 2)]
    jpegs = [path for path in root.glob("train/*/images/[!.]*") if path.suffix.lower() in (".jpeg", ".jpg")]
    train = [(path, path.parts[-3]) for path in sorted(jpegs)]
    trained, tested = ({wnid for _, wnid in samples} for samples in (train, test))
    if odd := sorted(trained ^ {*wnids} | tested - {*wnids}):
        raise ValueError(f"data set tiny_imagenet: {root} has no training image of {odd[0]}, or wnids.txt lacks it.")
    for part, samples in (("train", train), ("test", test)):
        images = decode([path for path, _ in samples], f"TinyImageNet {part}")
        keep(part, images, np.array([wnids.index(wnid) for _, wnid in samples]))
    return len(wnids), [words.get(wnid, wnid) for wnid in wnids]
