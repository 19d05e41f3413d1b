"""FedGC's handwritten digits: MNIST, MNIST-M, USPS and SVHN, all as RGB images of 32×32.

"Federated Learning under Gradient Constraints" (FedGC), §4.1. One array holds a composition of sets, in a cache of its
own: memory-mapped like any other set, where parts joined in memory would cost every run 760 MB. Decoding takes half a
minute, so compositions share nothing.

MNIST-M (Ganin & Lempitsky, ICML 2015) is read from its own archive, ``mnist_m/`` or ``mnist_m.tar.gz``. Where that is
absent, it is blended by its authors' recipe with CIFAR-10 in the place of BSDS500: each MNIST digit is |digit − patch|
in every channel, the patch a random 28×28 crop of a random photograph, training digits over training photographs and
test digits over test photographs, drawn once and for all.
"""

import logging
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets.cache import MANIFEST, Allocate, cached
from gcfed.data.sets.files import Origin, decode, is_plain, obtain, read_image
from gcfed.data.sets.matlab import read_mat
from gcfed.data.sets.vision import torchvision_set
from gcfed.utils.checked import SettingError, checked
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)

SIZE = 32
LARGEST = 2**24
"""Bytes of a file of MNIST-M; its table of labels has a million."""
MNIST_M = "http://yaroslav.ganin.net/"
USPS = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
SVHN = "http://ufldl.stanford.edu/housenumbers/"
SVHN_MD5 = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}

Digits = tuple[np.ndarray, np.ndarray]
"""uint8 images [n, 1 or 3, H, W] and int64 labels [n] of one part (train, test) of one set."""


@checked
def hwdigits(
    data_dir: str,
    download: bool = True,
    *,
    sets: Sequence[str] = ("mnist", "mnist_m", "usps", "svhn"),
    one_class: bool = False,
) -> FederatedDataset:
    """The sets one after another, [n, 3, 32, 32]: grey images in three equal channels, small ones enlarged bilinearly.

    Groups, of both splits, are the places of the sets in ``sets`` (HWDigits-4), or with ``one_class`` ten times the
    place plus the digit (HWDigits-40). ``mnist_m_blend`` asks for the blend even where MNIST-M's archive is there.

    Raises ValueError for an unknown or repeated set or an unreadable file; FileNotFoundError for a missing one.
    """
    if not sets or not set(sets) <= set(READ) or len(set(sets)) < len(sets):
        raise SettingError("sets", f"={[*sets]} must name some of {', '.join(READ)}, each once.")
    folder, name = Path(data_dir), "-".join(("hwdigits", *sets))
    source = _describe_mnist_m(folder) if "mnist_m" in sets else ""
    # What was made of an archive that is gone by now is MNIST-M still.
    if "mnist_m" in sets and not source and not (folder / "cache" / name / MANIFEST).exists():
        log.warning("MNIST-M: neither mnist_m/ nor mnist_m.tar.gz is in %s; blended from MNIST and CIFAR-10", folder)
        sets = ["mnist_m_blend" if name == "mnist_m" else name for name in sets]
        name = "-".join(("hwdigits", *sets))
    dataset = cached(folder, name, lambda allocate: _build(sets, folder, download, allocate), source)
    if one_class:
        train, test = (replace(s, groups=s.groups * 10 + s.y) for s in (dataset.train, dataset.test))  # type: ignore
        dataset = replace(dataset, train=train, test=test)
    return dataset


def _build(sets: Sequence[str], folder: Path, download: bool, allocate: Allocate) -> dict[str, Any]:
    for part in ("train", "test"):
        digits = [_read(name, folder, download, part, sets) for name in sets]
        sizes = [len(y) for _, y in digits]
        allocate(f"{part}_y", (sum(sizes),), np.int64)[:] = np.concatenate([y for _, y in digits])
        allocate(f"{part}_groups", (sum(sizes),), np.int64)[:] = np.repeat(np.arange(len(sets)), sizes)
        x = allocate(f"{part}_x", (sum(sizes), 3, SIZE, SIZE), np.uint8)
        for (images, _), end, size in zip(digits, np.cumsum(sizes), sizes, strict=True):
            _fit(images, x[end - size : end])
    return {"num_classes": 10, "class_names": [str(digit) for digit in range(10)]}


def _read(name: str, folder: Path, download: bool, part: str, sets: Sequence[str]) -> Digits:
    try:
        return READ[name](folder, download, part)
    except FileNotFoundError as error:
        needs = {name, "mnist_m_blend"} if name == "mnist" else {name}  # the blend is made of MNIST
        others = ",".join(other for other in sets if other not in needs) or "mnist"
        raise FileNotFoundError(f"{error} Or leave {name} out: data.dataset.sets=[{others}]") from error


def _fit(images: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 1 or 3, H, W] into [n, 3, 32, 32]; one channel fills all three."""
    import torch  # seconds to import, and most runs read the cache
    import torch.nn.functional as F

    for start in range(0, len(images), 4096):
        block = torch.tensor(images[start : start + 4096], dtype=torch.float32)
        if block.shape[2:] != (SIZE, SIZE):
            block = F.interpolate(block, size=(SIZE, SIZE), mode="bilinear", align_corners=False).round_()
        out[start : start + 4096] = block.numpy()


def _digits(labels: Sequence[object]) -> np.ndarray:
    """The digits 0 … 9, written or not, int64 [n]."""
    written = [str(label) for label in labels]
    if not written or not {*"0123456789"} >= {*written}:
        raise ValueError("its labels are not digits")
    return np.array(written).astype(np.int64)


# ------------------------------------------------------------------------------------------------------- the sets
def _mnist(folder: Path, download: bool, part: str) -> Digits:
    split: Split = getattr(torchvision_set("mnist", str(folder), download), part)
    return split.x, split.y


def _usps(folder: Path, download: bool, part: str) -> Digits:
    import torchvision.datasets  # seconds to import, and most runs read the cache

    root = folder / "USPS"
    url, file, md5 = torchvision.datasets.USPS.split_list[part]
    if not (root / file).is_file():  # one that is there may be packed otherwise: its lines are what counts
        obtain(root / file, md5, [url], Origin("usps", root, USPS), download)
    try:
        with np.errstate(invalid="raise"):  # of what is no number
            split = torchvision.datasets.USPS(root, train=part == "train")
        if len(split.data) != len(split.targets):
            raise ValueError("a line has no 256 values")
        return split.data[:, None], _digits(split.targets)
    except (OSError, EOFError, ValueError, IndexError, FloatingPointError) as error:
        raise ValueError(f"data set usps: {root / file} cannot be read ({error}): move it away.") from error


def _svhn(folder: Path, download: bool, part: str) -> Digits:
    path = folder / "SVHN" / f"{part}_32x32.mat"
    obtain(path, SVHN_MD5[part], [SVHN + path.name], Origin("svhn", path.parent, SVHN), download)
    arrays = read_mat(path)
    return arrays["X"].transpose(3, 2, 0, 1), arrays["y"].ravel().astype(np.int64) % 10  # its 0 is labelled 10


def _describe_mnist_m(folder: Path) -> str:
    """What would be read, told cheaply: a part of the archive may give way to all of it. Empty without an archive."""
    if (folder / "mnist_m").is_dir():
        counts = [sum(1 for _ in (folder / "mnist_m").glob(f"mnist_m_{part}/*")) for part in ("train", "test")]
        return "mnist_m/ with {} training and {} test images".format(*counts)
    archive = folder / "mnist_m.tar.gz"
    return f"{archive.name} of {archive.stat().st_size} bytes" if archive.is_file() else ""


def _mnist_m(folder: Path, download: bool, part: str) -> Digits:
    prefix, read = f"mnist_m/mnist_m_{part}", _open_mnist_m(folder, f"mnist_m/mnist_m_{part}")
    name = f"{prefix}_labels.txt"
    try:
        files, y = _mnist_m_labels(name, read(name))
        names = (f"{prefix}/{file}" for file in files)
        images = ((name, read_image(read(name), f"data set mnist_m: {name}", (SIZE, SIZE))) for name in names)
        return decode(images, len(files), f"MNIST-M {part}"), y
    except (FileNotFoundError, KeyError) as error:
        origin, name = Origin("mnist_m", folder, MNIST_M), getattr(error, "filename", None) or error.args[0]
        raise FileNotFoundError(origin.advice(f"{name} is missing", "mnist_m.tar.gz", download=True)) from error


def _mnist_m_labels(name: str, content: bytes) -> tuple[list[str], np.ndarray]:
    try:
        rows = [line.split() for line in content.decode().splitlines() if line.strip()]
        if any(len(row) != 2 or not is_plain(row[0]) for row in rows):
            raise ValueError("a line is not the name of an image and its label")
        return [file for file, _ in rows], _digits([label for _, label in rows])
    except ValueError as error:
        raise ValueError(f"data set mnist_m: {name} cannot be read ({error}): get the archive anew.") from error


def _open_mnist_m(folder: Path, prefix: str) -> Callable[[str], bytes]:
    """How to read a file whose name begins so, from the unpacked archive or from all of the packed one."""
    if (folder / "mnist_m").is_dir():
        return lambda name: (folder / name).read_bytes()
    path = folder / "mnist_m.tar.gz"
    try:
        with tarfile.open(path) as archive:
            members = ((m.name.removeprefix("./"), m) for m in archive if m.isreg() and m.size < LARGEST)
            wanted = ((name, archive.extractfile(m)) for name, m in members if name.startswith(prefix))
            return {name: file.read() for name, file in wanted if file}.__getitem__
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        reason = str(error).partition(":\n")[0]  # without every format that was tried
        raise ValueError(f"data set mnist_m: {path} cannot be read ({reason}): get it anew from {MNIST_M}.") from error


def _mnist_m_blend(folder: Path, download: bool, part: str) -> Digits:
    digits, labels = _mnist(folder, download, part)
    try:
        photos: np.ndarray = getattr(torchvision_set("cifar10", str(folder), download), part).x
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"data set mnist_m: put mnist_m.tar.gz from {MNIST_M} into {folder.resolve()}; without it MNIST-M is "
            f"blended from MNIST and CIFAR-10, and CIFAR-10 is missing too: {error}"
        ) from error
    rng = generator(0, "mnist_m", part == "test")
    photo = rng.integers(len(photos), size=len(digits))
    side = digits.shape[-1]
    row, column = rng.integers(photos.shape[-1] - side + 1, size=(2, len(digits)))
    crops = np.lib.stride_tricks.sliding_window_view(photos, (side, side), axis=(2, 3))
    patches = crops[photo, :, row, column]
    return np.maximum(digits, patches) - np.minimum(digits, patches), labels


READ: dict[str, Callable[[Path, bool, str], Digits]] = {
    "mnist": _mnist,
    "mnist_m": _mnist_m,
    "usps": _usps,
    "svhn": _svhn,
    "mnist_m_blend": _mnist_m_blend,
}
