"""Sets that torchvision knows, through its own classes, downloaders and checksums; afterwards read from the cache."""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import Allocate, cached
from gcfed.data.sets.files import Origin, md5sum, obtain

# name → torchvision's class, the official page, the class's further arguments
SETS: dict[str, tuple[str, str, dict[str, str]]] = {
    "cifar10": ("CIFAR10", "https://www.cs.toronto.edu/~kriz/cifar.html", {}),
    "cifar100": ("CIFAR100", "https://www.cs.toronto.edu/~kriz/cifar.html", {}),
    "mnist": ("MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist/", {}),
    "fashion_mnist": ("FashionMNIST", "https://github.com/zalandoresearch/fashion-mnist", {}),
    "emnist_byclass": ("EMNIST", "https://www.nist.gov/itl/products-and-services/emnist-dataset", {"split": "byclass"}),
    "emnist_balanced": (
        "EMNIST",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        {"split": "balanced"},
    ),
}


def torchvision_set(name: str, data_dir: str, download: bool = True) -> FederatedDataset:
    """One of :data:`SETS`: [n, 3, 32, 32] for CIFAR, [n, 1, 28, 28] for the MNIST family.

    EMNIST's images stay transposed, as its files and torchvision have them. Searched are the unpacked files, then the
    archives in their place under ``data_dir``, then, with ``download``, their official addresses.

    Raises ValueError for an unknown name or a wrong checksum, FileNotFoundError for missing files.
    """
    if name not in SETS:
        raise ValueError(f"data.dataset.name={name!r} is not one of {', '.join(SETS)}")
    return cached(data_dir, name, lambda allocate: _decode(name, Path(data_dir), download, allocate))


def _decode(name: str, folder: Path, download: bool, allocate: Allocate) -> dict[str, Any]:
    import torchvision.datasets  # seconds to import, and most runs read the cache

    class_name, page, options = SETS[name]
    cls = getattr(torchvision.datasets, class_name)
    origin = Origin(name, folder, page)
    trouble = _trouble(cls, folder, options)
    if not trouble:
        return _copy(cls, folder, options, allocate)

    archives = _archives(cls, folder)
    if not download and not all(path.exists() for path, _, _ in archives):
        names = ", ".join(path.relative_to(folder).as_posix() for path, _, _ in archives)
        error = FileNotFoundError if any("missing" in line for line in trouble) else ValueError
        raise error(origin.advice("; ".join(trouble), names))
    # Unpacked aside: torchvision would write over what lies in the data folder, and a second process would read it half
    # written. The archive is kept, the unpacked files are not needed once the cache has them.
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as stage:
        for path, md5, urls in archives:
            obtain(path, md5, urls, origin, download)
            link = Path(stage) / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        return _copy(cls, Path(stage), {**options, "download": True}, allocate)


def _copy(cls: Any, folder: Path, options: dict[str, Any], allocate: Allocate) -> dict[str, Any]:
    for part in ("train", "test"):
        split = cls(folder, train=part == "train", **options)
        images, labels = np.asarray(split.data), np.asarray(split.targets)
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        allocate(f"{part}_x", images.shape, np.uint8)[:] = images
        allocate(f"{part}_y", labels.shape, np.int64)[:] = labels
    return {"num_classes": len(split.classes), "class_names": list(split.classes)}


def _trouble(cls: Any, folder: Path, options: dict[str, str]) -> list[str]:
    """What is wrong with the unpacked files, a line each; empty if nothing is."""
    if hasattr(cls, "base_folder"):  # CIFAR lists every file with its checksum
        listed = [*cls.train_list, *cls.test_list, (cls.meta["filename"], cls.meta["md5"])]
        files = [(Path(cls.base_folder) / file, md5) for file, md5 in listed]
    else:  # the MNIST family has none for unpacked files, but its headers tell their size
        raw, split = Path(cls.__name__) / "raw", options.get("split")
        parts = (f"emnist-{split}-train", f"emnist-{split}-test") if split else ("train", "t10k")
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        files = [(raw / f"{part}-{kind}", "") for part in parts for kind in kinds]
    lines = []
    for file, md5 in files:
        path = folder / file
        if not path.is_file():
            lines.append(f"{file.as_posix()} is missing")
        elif md5 and md5sum(path) != md5:
            lines.append(f"{file.as_posix()} has the wrong checksum")
        elif not md5 and not (axes := _idx_axes(path)):
            lines.append(f"{file.as_posix()} is truncated, empty or no IDX file")
        elif not md5 and axes[1:] != [28, 28] * ("images" in file.name):
            lines.append(f"{file.as_posix()} holds values of the shape {axes}")
    return lines


def _idx_axes(path: Path) -> list[int]:
    """The shape in a whole IDX file of bytes: 0, 0, 8, the number of axes, each as a big-endian int32, then the values;
    empty for any other file.
    """
    with path.open("rb") as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08":
            return []
        header = file.read(4 * magic[3])
    axes = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
    size = math.prod(axes)
    whole = len(axes) == magic[3] and path.stat().st_size == 4 + len(header) + size
    return axes if whole and size else []


def _archives(cls: Any, folder: Path) -> list[tuple[Path, str, list[str]]]:
    """(place, md5, addresses) of every archive, where torchvision's class looks for it."""
    if hasattr(cls, "base_folder"):
        return [(folder / cls.filename, cls.tgz_md5, [cls.url])]
    raw = folder / cls.__name__ / "raw"
    if "url" in vars(cls):  # EMNIST: one archive for all its splits
        return [(raw / Path(cls.url).name, cls.md5, [cls.url])]
    return [(raw / file, md5, [mirror + file for mirror in cls.mirrors]) for file, md5 in cls.resources]
