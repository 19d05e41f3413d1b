"""Sets that torchvision knows, through its own classes, downloaders and checksums; afterwards read from the cache."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import Raw, cached
from gcfed.data.sets.files import Origin, obtain
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


@checked
def torchvision_set(name: str, data_dir: str, download: bool = True) -> FederatedDataset:
    """One of :data:`SETS`: [n, 3, 32, 32] for CIFAR, [n, 1, 28, 28] for the MNIST family.

    EMNIST's images stay transposed, as its files and torchvision have them. Searched are the unpacked files, then the
    archives in their place under ``data_dir``, then, with ``download``, their official addresses.

    Raises ValueError for an unknown name or a wrong checksum, FileNotFoundError for missing or broken files.
    """
    if name not in SETS:
        raise SettingError("name", f"={name} is not one of {', '.join(SETS)}.")
    return cached(data_dir, name, lambda _: _decode(name, Path(data_dir), download))


def _decode(name: str, folder: Path, download: bool) -> Raw:
    import torchvision.datasets  # seconds to import, and most runs read the cache

    class_name, page, options = SETS[name]
    cls = getattr(torchvision.datasets, class_name)
    origin = Origin(name, folder, f"https://{page}")
    archives = _archives(cls, folder)
    try:
        return _read(cls, folder, options)
    except (RuntimeError, ValueError, AssertionError, KeyError) as error:  # torchvision's, of files of each format
        if not download and not all(path.exists() for path, _, _ in archives):
            place = getattr(cls, "base_folder", f"{class_name}/raw")
            names = ", ".join(path.relative_to(folder).as_posix() for path, _, _ in archives)
            raise origin.missing(f"a file in {place} is missing or broken", names) from error
    # Unpacked aside: torchvision would write over what lies in the data folder, and a second process would read it half
    # written. The archive is kept, the unpacked files are not needed once the cache has them.
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as stage:
        for path, md5, urls in archives:
            obtain(path, md5, urls, origin, download)
            link = Path(stage) / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        return _read(cls, Path(stage), {**options, "download": True})


def _read(cls: Any, folder: Path, options: dict[str, Any]) -> Raw:
    parts = {}
    for part in ("train", "test"):
        split = cls(folder, train=part == "train", **options)
        x = np.asarray(split.data)
        if x.shape[1:] not in ((28, 28), (32, 32, 3)):  # the MNIST family's headers say any
            raise ValueError(f"{part} images of the shape {[*x.shape]}")
        parts[part] = (x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)), np.asarray(split.targets, np.int64)
    return parts, len(split.classes), split.classes


def _archives(cls: Any, folder: Path) -> list[tuple[Path, str, list[str]]]:
    """(place, md5, addresses) of every archive, where torchvision's class looks for it."""
    if hasattr(cls, "base_folder"):
        return [(folder / cls.filename, cls.tgz_md5, [cls.url])]
    raw = folder / cls.__name__ / "raw"
    if "url" in vars(cls):  # EMNIST: one archive for all its splits
        return [(raw / Path(cls.url).name, cls.md5, [cls.url])]
    return [(raw / file, md5, [mirror + file for mirror in cls.mirrors]) for file, md5 in cls.resources]
