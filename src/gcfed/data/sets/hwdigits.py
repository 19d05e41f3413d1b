"""FedGC's handwritten digits: MNIST, MNIST-M, USPS and SVHN."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets.cache import SplitWriter, cached
from gcfed.data.sets.files import count_files, missing_files, rows_of
from gcfed.data.sets.pixels import decode, pictures_of
from gcfed.data.sets.vision import MNIST, published
from gcfed.utils.checked import SettingError, checked
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import Refusal

NAMES = ("mnist", "mnist_m", "usps", "svhn")
#: The order in which they are read, so that a set that is missing is named soon.
QUICK_FIRST = ("mnist", "svhn", "usps", "mnist_m")
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

    Raises SettingError for an unknown or repeated set or an unreadable file; FileNotFoundError for
    a missing file.
    """
    if not sets or not set(sets) <= set(NAMES) or len(set(sets)) < len(sets):
        raise SettingError("sets", f"={[*sets]} must name some of {', '.join(NAMES)}, each once.")
    folder = Path(data_dir)

    def build(keep: SplitWriter) -> tuple[int, str]:
        for part in ("train", "test"):
            digits = {}
            for name in sorted(sets, key=QUICK_FIRST.index):
                digits[name] = _read_digits(name, folder, download, part, keep)
            xs = [digits[name][0] for name in sets]
            ys = [digits[name][1] for name in sets]
            groups = np.repeat(np.arange(len(sets)), [*map(len, ys)])
            blocks = (block for images in xs for block in _resized(images))
            keep(part, blocks, np.concatenate(ys), groups)
        return 10, "0123456789"

    source = ""
    if "mnist_m" in sets:
        source = count_files(folder / "mnist_m", "mnist_m_train", "mnist_m_test")
    dataset = cached(folder, "-".join(("hwdigits", *sets)), build, source)
    if not one_class:
        return dataset
    return replace(dataset, train=_by_class(dataset.train), test=_by_class(dataset.test))


def _by_class(split: Split) -> Split:
    """The split with a group for each digit of each set."""
    assert split.groups is not None
    return replace(split, groups=split.groups * 10 + split.y)


def _resized(images: ndarray) -> Iterator[ndarray]:
    """uint8 [n, 1 or 3, H, W] in blocks [m, 3, 32, 32]."""
    for block in torch.from_numpy(images).split(4096):
        if block.shape[2:] != (32, 32):
            block = F.interpolate(block.float(), size=(32, 32), mode="bilinear").round_()
        yield block.expand(-1, 3, -1, -1).to(torch.uint8).numpy()


def _read_digits(
    name: str, folder: Path, download: bool, part: str, keep: SplitWriter
) -> tuple[ndarray, ndarray]:
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


def _read_mnist_m(root: Path, part: str, keep: SplitWriter) -> tuple[ndarray, ndarray]:
    if not root.is_dir():
        page = "http://yaroslav.ganin.net/ (unpacked)"
        raise missing_files("mnist_m", root, "the folder is missing", page)
    table = root / f"mnist_m_{part}_labels.txt"
    rows = rows_of(table, 2)
    paths = [root / f"mnist_m_{part}" / Path(file).name for file, *_ in rows]
    labels = [label for _, label, *_ in rows]
    no_digits = [label for label in labels if not (label.isascii() and label.isdigit())]
    if no_digits:
        raise Refusal(f"{table} has a label {no_digits[0]!r}, which is no digit")
    images = decode(pictures_of(paths), f"MNIST-M {part}", note=keep.note)
    return np.concatenate([*images]), np.array([*map(int, labels)])
