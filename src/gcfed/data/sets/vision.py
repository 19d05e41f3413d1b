"""Data sets with official archives: those of torchvision, by its own classes, and TinyImageNet, zipped or unpacked, or
any part of it in the same layout. Afterwards they are read from the cache.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torchvision.datasets

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
        class_name, page, options = SETS[name]
        cls = getattr(torchvision.datasets, class_name)
        try:
            splits = [cls(data_dir, train=train, download=download, **options) for train in (True, False)]
        except (OSError, RuntimeError, ValueError, AssertionError, KeyError) as error:  # torchvision's, by format
            place = getattr(cls, "base_folder", f"{class_name}/raw")
            what = f"a file in {place} is missing or broken ({error})"
            raise Origin(name, Path(data_dir), f"https://{page}").missing(what, place, download) from error
        for part, split in zip(("train", "test"), splits, strict=True):
            x = np.asarray(split.data)
            keep(part, x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2), np.asarray(split.targets, np.int64))
        return len(splits[0].classes), splits[0].classes

    return cached(data_dir, name, build)


def tiny_imagenet(data_dir: str, download: bool = True) -> FederatedDataset:
    """TinyImageNet, [n, 3, 64, 64]; its validation images are the test split, its classes the lines of ``wnids.txt``.

    Read from ``tiny-imagenet-200/`` in ``data_dir``, with whatever images are there, or else from the official
    ``tiny-imagenet-200.zip``, which need not be unpacked and is downloaded if it may be.

    Raises FileNotFoundError for missing files; ValueError for a broken image or an unknown class.
    """
    root, archive = Path(data_dir) / TINY, Path(data_dir) / ARCHIVE

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        if not root.is_dir():
            obtain(archive, MD5, URL, Origin("tiny_imagenet", root.parent, URL), download)
        with unpacked(root, archive) as folder:
            return _read_tiny(folder, keep)

    return cached(data_dir, "tiny_imagenet", build, described(root, ("train/*/images", "val/images"), archive))


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
        images = decode([path for path, _ in samples], f"TinyImageNet {part}", side=64)
        keep(part, images, np.array([wnids.index(wnid) for _, wnid in samples]))
    return len(wnids), [words.get(wnid, wnid) for wnid in wnids]
