"""FedGC's handwritten digits: MNIST, MNIST-M, USPS and SVHN, all as RGB images of 32×32. SVHN needs SciPy.

"Federated Learning under Gradient Constraints" (FedGC), §4.1. MNIST-M (Ganin & Lempitsky, ICML 2015) is read from the
folder ``mnist_m/`` of its authors' archive. Each choice of sets has a cache of its own, so that runs can map one array.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.files import Keep, cached, counted, missing, rows_of
from gcfed.data.sets.images import decode
from gcfed.data.sets.vision import SETS, published
from gcfed.utils.checked import SettingError, checked
from gcfed.utils.instantiate import installed

SIZE = 32
NAMES = ("mnist", "mnist_m", "usps", "svhn")
MNIST_M = "http://yaroslav.ganin.net/ (unpacked)"
USPS = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
SVHN = "http://ufldl.stanford.edu/housenumbers/"

Digits = tuple[np.ndarray, np.ndarray]
"""uint8 images [n, 1 or 3, H, W] and int64 labels [n] of one part (train, test) of one set."""


@checked
def hwdigits(
    data_dir: str, download: bool = True, *, sets: Sequence[str] = NAMES, one_class: bool = False
) -> FederatedDataset:
    """The sets in this order, [n, 3, 32, 32]. Grey images get three equal channels; small ones are enlarged bilinearly.

    A sample's group is the position of its set in ``sets`` (HWDigits-4). With ``one_class`` it is ten times the
    position plus the digit (HWDigits-40).

    Raises ValueError for an unknown or repeated set or an unreadable file; FileNotFoundError for a missing file.
    """
    if not sets or not set(sets) <= set(NAMES) or len(set(sets)) < len(sets):
        raise SettingError("sets", f"={[*sets]} must name some of {', '.join(NAMES)}, each once.")
    folder = Path(data_dir)
    source = counted(folder / "mnist_m", "mnist_m_train", "mnist_m_test") if "mnist_m" in sets else ""
    dataset = cached(folder, "-".join(("hwdigits", *sets)), partial(_build, sets, folder, download), source)
    if one_class:
        train, test = (replace(s, groups=s.groups * 10 + s.y) for s in (dataset.train, dataset.test))  # type: ignore
        dataset = replace(dataset, train=train, test=test)
    return dataset


def _build(sets: Sequence[str], folder: Path, download: bool, keep: Keep) -> tuple[int, str]:
    for part in ("train", "test"):
        digits = [_read(name, folder, download, part) for name in sets]
        groups = np.repeat(np.arange(len(sets)), [len(y) for _, y in digits])
        blocks = (block for images, _ in digits for block in _resized(images))
        keep(part, blocks, np.concatenate([y for _, y in digits]), groups)
    return 10, "0123456789"


def _resized(images: np.ndarray) -> Iterator[np.ndarray]:
    """uint8 [n, 1 or 3, H, W] in blocks [m, 3, 32, 32]."""
    for start in range(0, len(images), 4096):
        block = torch.tensor(images[start : start + 4096], dtype=torch.float32)
        if block.shape[2:] != (SIZE, SIZE):
            block = F.interpolate(block, size=(SIZE, SIZE), mode="bilinear", align_corners=False).round_()
        yield block.expand(-1, 3, -1, -1).to(torch.uint8).numpy()


def _read(name: str, folder: Path, download: bool, part: str) -> Digits:
    if name == "mnist_m":
        return _mnist_m(folder / "mnist_m", part)
    split: Any
    if name == "svhn":
        installed("scipy", "SVHN's files are MATLAB files, and data.dataset.sets=[svhn]")
        split = published(name, "SVHN", folder / "SVHN", SVHN, download, split=part)
        return split.data, split.labels
    root, page = (folder, SETS["mnist"][1]) if name == "mnist" else (folder / "USPS", USPS)
    split = published(name, name.upper(), root, page, download, train=part == "train")
    return np.asarray(split.data)[:, None], np.asarray(split.targets, np.int64)


def _mnist_m(root: Path, part: str) -> Digits:
    if not root.is_dir():
        raise missing("mnist_m", root, "the folder is missing", MNIST_M)
    rows = rows_of(root / f"mnist_m_{part}_labels.txt", 2)
    paths = [root / f"mnist_m_{part}" / Path(file).name for file, *_ in rows]
    images = np.concatenate([*decode(paths, f"MNIST-M {part}")])
    return images, np.array([int(label) for _, label, *_ in rows])
