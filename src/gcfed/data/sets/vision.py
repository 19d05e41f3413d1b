"""Sets that torchvision knows, through its own classes, downloaders and checksums; afterwards read from the cache."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import Allocate, cached
from gcfed.data.sets.files import Origin, md5sum, obtain
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

    Raises ValueError for an unknown name or a wrong checksum, FileNotFoundError for missing files.
    """
    if name not in SETS:
        raise SettingError("name", f"={name} is not one of {', '.join(SETS)}.")
    return cached(data_dir, name, lambda allocate: _decode(name, Path(data_dir), download, allocate))


def _decode(name: str, folder: Path, download: bool, allocate: Allocate) -> dict[str, Any]:
    import torchvision.datasets  # seconds to import, and most runs read the cache

    class_name, page, options = SETS[name]
    cls = getattr(torchvision.datasets, class_name)
    origin = Origin(name, folder, f"https://{page}")
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
    wrong = ((file.as_posix(), _wrong(folder / file, md5)) for file, md5 in files)
    return [f"{name} {what}" for name, what in wrong if what]


def _wrong(path: Path, md5: str) -> str:
    """What is wrong with a file, of whose checksum "" says that it is an IDX file of images or labels."""
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    if not path.is_file():
        return "is missing"
    if md5:
        return "has the wrong checksum" * (md5sum(path) != md5)
    try:
        axes = [*read_sn3_pascalvincent_tensor(str(path)).shape]
    except (AssertionError, ValueError, RuntimeError, KeyError):
        return "is truncated, empty or no IDX file"
    return f"holds values of the shape {axes}" * (axes[1:] != [28, 28] * ("images" in path.name))


def _archives(cls: Any, folder: Path) -> list[tuple[Path, str, list[str]]]:
    """(place, md5, addresses) of every archive, where torchvision's class looks for it."""
    if hasattr(cls, "base_folder"):
        return [(folder / cls.filename, cls.tgz_md5, [cls.url])]
    raw = folder / cls.__name__ / "raw"
    if "url" in vars(cls):  # EMNIST: one archive for all its splits
        return [(raw / Path(cls.url).name, cls.md5, [cls.url])]
    return [(raw / file, md5, [mirror + file for mirror in cls.mirrors]) for file, md5 in cls.resources]
