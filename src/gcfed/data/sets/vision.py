"""Data sets of images with official archives: torchvision's and TinyImageNet."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import SplitWriter, cached
from gcfed.data.sets.files import count_files, missing_files, obtain, rows_of
from gcfed.data.sets.pixels import decode, pictures_of
from gcfed.utils.checked import SettingError, checked
from gcfed.utils.refusal import Refusal

MNIST = "ossci-datasets.s3.amazonaws.com/mnist/"
CIFAR = "www.cs.toronto.edu/~kriz/cifar.html"
EMNIST = "www.nist.gov/itl/products-and-services/emnist-dataset"
FASHION = "github.com/zalandoresearch/fashion-mnist"


class TorchvisionSet(NamedTuple):
    """A data set of torchvision."""

    class_name: str
    page: str  # the official one
    split: str = ""  # an argument of the class, if it has several splits of its own


SETS = {
    "cifar10": TorchvisionSet("CIFAR10", CIFAR),
    "cifar100": TorchvisionSet("CIFAR100", CIFAR),
    "mnist": TorchvisionSet("MNIST", MNIST),
    "fashion_mnist": TorchvisionSet("FashionMNIST", FASHION),
    "emnist_byclass": TorchvisionSet("EMNIST", EMNIST, "byclass"),
    "emnist_balanced": TorchvisionSet("EMNIST", EMNIST, "balanced"),
}

TINY = "tiny-imagenet-200"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


@checked
def torchvision_set(name: str, data_dir: str, download: bool = True) -> FederatedDataset:
    """One of :data:`SETS`: [n, 3, 32, 32] for CIFAR, [n, 1, 28, 28] for the MNIST family.

    EMNIST's images stay transposed, as in torchvision, which looks for its files in ``data_dir``.

    Raises SettingError for an unknown name, FileNotFoundError for missing or broken files.
    """
    if name not in SETS:
        raise SettingError("name", f"={name} is not one of {', '.join(SETS)}.")

    def build(keep: SplitWriter) -> tuple[int, Sequence[str]]:
        class_name, page, split_of_class = SETS[name]
        options: dict[str, Any] = {"split": split_of_class} if split_of_class else {}
        for part in ("train", "test"):
            options["train"] = part == "train"
            split = published(name, class_name, Path(data_dir), page, download, **options)
            x = np.asarray(split.data)
            images = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
            keep(part, images, np.asarray(split.targets, np.int64))
        return len(split.classes), split.classes

    return cached(data_dir, name, build)


def published(
    name: str, class_name: str, folder: Path, page: str, download: bool, **options: Any
) -> Any:
    """The data set that a class of torchvision reads.

    Raises FileNotFoundError for missing or broken files.
    """
    import torchvision.datasets  # it imports the compiler

    try:
        return getattr(torchvision.datasets, class_name)(folder, download=download, **options)
    except Exception as error:  # of any type, by the format of the files
        trouble = f"a file is missing or broken ({error})"
        raise missing_files(name, folder, trouble, page, not download) from error


def tiny_imagenet(data_dir: str, download: bool = True) -> FederatedDataset:
    """TinyImageNet, [n, 3, 64, 64].

    The test split is the validation images; classes have the order of ``wnids.txt``.

    Reads the folder ``tiny-imagenet-200/`` in ``data_dir``, which may hold a part of the images. If
    it is missing, the official ``tiny-imagenet-200.zip`` is unpacked there, and downloaded first if
    ``download`` is set.

    Raises FileNotFoundError for missing files; Refusal for a broken image or an unknown class.
    """
    folder = Path(data_dir)
    root = folder / TINY
    if not root.is_dir() and not (folder / "cache/tiny_imagenet").is_dir():
        archive = folder / f"{TINY}.zip"
        obtain(archive, MD5, f"http://cs231n.stanford.edu/{TINY}.zip", "tiny_imagenet", download)
        # a killed run leaves no part of the images
        with TemporaryDirectory(prefix=".unpack-", dir=folder) as stage:
            shutil.unpack_archive(archive, stage)
            with suppress(OSError):  # another process was faster
                (Path(stage) / TINY).rename(root)
    source = count_files(root, "train/*/images", "val/images")
    return cached(data_dir, "tiny_imagenet", partial(_read_tiny, root), source)


def _read_tiny(root: Path, keep: SplitWriter) -> tuple[int, list[str]]:
    wnids = [wnid for wnid, *_ in rows_of(root / "wnids.txt", 1)]
    words = dict(row[:2] for row in rows_of(root / "words.txt", 2, "\t"))
    parts = {"train": _trained(root), "test": _tested(root)}
    trained = {wnid for _, wnid in parts["train"]}
    tested = {wnid for _, wnid in parts["test"]}
    mismatched = sorted(trained ^ {*wnids} | tested - {*wnids})
    if mismatched:
        raise Refusal(
            f"data set tiny_imagenet: {root} has no training image of {mismatched[0]}, or wnids.txt"
            " lacks it."
        )
    for part, samples in parts.items():
        pictures = pictures_of(path for path, _ in samples)
        images = decode(pictures, f"TinyImageNet {part}", note=keep.note)
        keep(part, images, np.array([wnids.index(wnid) for _, wnid in samples]))
    return len(wnids), [words.get(wnid, wnid) for wnid in wnids]


def _trained(root: Path) -> list[tuple[Path, str]]:
    """The training images and their classes."""
    samples = []
    for path in sorted(root.glob("train/*/images/[!.]*")):
        if path.suffix.lower() in (".jpeg", ".jpg"):
            samples.append((path, path.parts[-3]))
    return samples


def _tested(root: Path) -> list[tuple[Path, str]]:
    """The validation images and their classes."""
    rows = rows_of(root / "val/val_annotations.txt", 2)
    return [(root / "val/images" / file, wnid) for file, wnid, *_ in rows]
