"""Data sets of images with official archives: torchvision's, TinyImageNet, and FedGC's handwritten
digits.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets.files import (
    Keep,
    cached,
    counted,
    missing,
    obtain,
    rows_of,
)
from gcfed.data.sets.images import decode
from gcfed.utils.checked import SettingError, checked
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import Refusal

MNIST = "ossci-datasets.s3.amazonaws.com/mnist/"
CIFAR = "www.cs.toronto.edu/~kriz/cifar.html"
EMNIST = "www.nist.gov/itl/products-and-services/emnist-dataset"
FASHION = "github.com/zalandoresearch/fashion-mnist"


class Published(NamedTuple):
    """A data set of torchvision."""

    class_name: str
    page: str  # the official one
    split: str = ""  # an argument of the class, if it has several splits of its own


SETS = {
    "cifar10": Published("CIFAR10", CIFAR),
    "cifar100": Published("CIFAR100", CIFAR),
    "mnist": Published("MNIST", MNIST),
    "fashion_mnist": Published("FashionMNIST", FASHION),
    "emnist_byclass": Published("EMNIST", EMNIST, "byclass"),
    "emnist_balanced": Published("EMNIST", EMNIST, "balanced"),
}

TINY = "tiny-imagenet-200"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


@checked
def torchvision_set(name: str, data_dir: str, download: bool = True) -> FederatedDataset:
    """One of :data:`SETS`: [n, 3, 32, 32] for CIFAR, [n, 1, 28, 28] for the MNIST family.

    EMNIST's images stay transposed, as in torchvision, which looks for its files in ``data_dir``.

    Raises ValueError for an unknown name, FileNotFoundError for missing or broken files.
    """
    if name not in SETS:
        raise SettingError("name", f"={name} is not one of {', '.join(SETS)}.")

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
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
    except (
        OSError,
        EOFError,
        RuntimeError,
        ValueError,
        AssertionError,
        KeyError,
        IndexError,
    ) as error:  # by format
        raise missing(name, folder, f"a file is missing or broken ({error})", page) from error


def tiny_imagenet(data_dir: str, download: bool = True) -> FederatedDataset:
    """TinyImageNet, [n, 3, 64, 64].

    The test split is the validation images; classes have the order of ``wnids.txt``.

    Reads the folder ``tiny-imagenet-200/`` in ``data_dir``, which may hold a part of the images. If
    it is missing, the official ``tiny-imagenet-200.zip`` is unpacked there, and downloaded first if
    ``download`` is set.

    Raises FileNotFoundError for missing files; ValueError for a broken image or an unknown class.
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
    source = counted(root, "train/*/images", "val/images")
    return cached(data_dir, "tiny_imagenet", partial(_read_tiny, root), source)


def _read_tiny(root: Path, keep: Keep) -> tuple[int, list[str]]:
    wnids = [wnid for wnid, *_ in rows_of(root / "wnids.txt", 1)]
    words = dict(row[:2] for row in rows_of(root / "words.txt", 2, "\t"))
    parts = {"train": _trained(root), "test": _tested(root)}
    trained = {wnid for _, wnid in parts["train"]}
    tested = {wnid for _, wnid in parts["test"]}
    odd = sorted(trained ^ {*wnids} | tested - {*wnids})
    if odd:
        raise Refusal(
            f"data set tiny_imagenet: {root} has no training image of {odd[0]}, or wnids.txt"
            " lacks it."
        )
    for part, samples in parts.items():
        images = decode([path for path, _ in samples], f"TinyImageNet {part}", note=keep.note)
        keep(part, images, np.array([wnids.index(wnid) for _, wnid in samples]))
    return len(wnids), [words.get(wnid, wnid) for wnid in wnids]


def _trained(root: Path) -> list[tuple[Path, str]]:
    """The training images and their classes."""
    found = []
    for path in sorted(root.glob("train/*/images/[!.]*")):
        if path.suffix.lower() in (".jpeg", ".jpg"):
            found.append((path, path.parts[-3]))
    return found


def _tested(root: Path) -> list[tuple[Path, str]]:
    """The validation images and their classes."""
    rows = rows_of(root / "val/val_annotations.txt", 2)
    return [(root / "val/images" / file, wnid) for file, wnid, *_ in rows]


# ----------------------------------------------------------------- FedGC's handwritten digits
NAMES = ("mnist", "mnist_m", "usps", "svhn")
USPS = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"


@checked
def hwdigits(
    data_dir: str, download: bool = True, *, sets: Sequence[str] = NAMES, one_class: bool = False
) -> FederatedDataset:
    """MNIST, MNIST-M, USPS and SVHN, or some of them in this order, [n, 3, 32, 32] ("Federated
    Learning under Gradient Constraints", FedGC, §4.1). Grey images get three equal channels; small
    ones are enlarged bilinearly.

    MNIST-M (Ganin & Lempitsky, ICML 2015) is the folder ``mnist_m/`` of its authors' archive; SVHN
    needs SciPy. A sample's group is its set's position p in ``sets`` (HWDigits-4), or with
    ``one_class`` 10 p + digit (HWDigits-40).

    Raises ValueError for an unknown or repeated set or an unreadable file; FileNotFoundError for a
    missing file.
    """
    if not sets or not set(sets) <= set(NAMES) or len(set(sets)) < len(sets):
        raise SettingError("sets", f"={[*sets]} must name some of {', '.join(NAMES)}, each once.")
    folder = Path(data_dir)

    def build(keep: Keep) -> tuple[int, str]:
        for part in ("train", "test"):
            xs = []
            ys = []
            for name in sets:
                images, labels = _read_digits(name, folder, download, part, keep)
                xs.append(images)
                ys.append(labels)
            groups = np.repeat(np.arange(len(sets)), [*map(len, ys)])
            blocks = (block for images in xs for block in _resized(images))
            keep(part, blocks, np.concatenate(ys), groups)
        return 10, "0123456789"

    source = ""
    if "mnist_m" in sets:
        source = counted(folder / "mnist_m", "mnist_m_train", "mnist_m_test")
    dataset = cached(folder, "-".join(("hwdigits", *sets)), build, source)
    if not one_class:
        return dataset
    return replace(dataset, train=_by_class(dataset.train), test=_by_class(dataset.test))


def _by_class(split: Split) -> Split:
    """The split with a group for each digit of each set."""
    assert split.groups is not None
    return replace(split, groups=split.groups * 10 + split.y)


def _resized(images: np.ndarray) -> Iterator[np.ndarray]:
    """uint8 [n, 1 or 3, H, W] in blocks [m, 3, 32, 32]."""
    for block in torch.from_numpy(images).split(4096):
        if block.shape[2:] != (32, 32):
            block = F.interpolate(block.float(), size=(32, 32), mode="bilinear").round_()
        yield block.expand(-1, 3, -1, -1).to(torch.uint8).numpy()


def _read_digits(
    name: str, folder: Path, download: bool, part: str, keep: Keep
) -> tuple[np.ndarray, np.ndarray]:
    """The images, uint8 [n, 1 or 3, H, W], and labels, int64 [n], of one part of a set."""
    if name == "svhn":
        installed("scipy", "SVHN's files are MATLAB files, and data.dataset.sets=[svhn]")
        split = published(
            name, "SVHN", folder / "SVHN", "ufldl.stanford.edu/housenumbers/", download, split=part
        )
        return split.data, split.labels
    if name == "mnist_m":
        return _read_mnist_m(folder / "mnist_m", part, keep)
    root = folder
    page = MNIST
    if name == "usps":
        root = folder / "USPS"
        page = USPS
    split = published(name, name.upper(), root, page, download, train=part == "train")
    return np.array(split.data)[:, None], np.asarray(split.targets, np.int64)


def _read_mnist_m(root: Path, part: str, keep: Keep) -> tuple[np.ndarray, np.ndarray]:
    if not root.is_dir():
        page = "http://yaroslav.ganin.net/ (unpacked)"
        raise missing("mnist_m", root, "the folder is missing", page)
    images = decode(_mnist_m_images(root, part), f"MNIST-M {part}", note=keep.note)
    labels = [label for _, label, *_ in rows_of(_mnist_m_labels(root, part), 2)]
    odd = [label for label in labels if not (label.isascii() and label.isdigit())]
    if odd:
        raise Refusal(f"{_mnist_m_labels(root, part)} has a label {odd[0]!r}, which is no digit")
    return np.concatenate([*images]), np.array([*map(int, labels)])


def _mnist_m_labels(root: Path, part: str) -> Path:
    return root / f"mnist_m_{part}_labels.txt"


def _mnist_m_images(root: Path, part: str) -> list[Path]:
    rows = rows_of(_mnist_m_labels(root, part), 2)
    return [root / f"mnist_m_{part}" / Path(file).name for file, *_ in rows]
