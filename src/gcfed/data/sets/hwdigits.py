"""FedGC's handwritten digits: MNIST, MNIST-M, USPS and SVHN, all as RGB images of 32×32. SVHN needs SciPy.

"Federated Learning under Gradient Constraints" (FedGC), §4.1. One array holds a composition of sets, in a cache of its
own: memory-mapped like any other set, where parts joined in memory would cost every run 760 MB. Decoding takes half a
minute, so compositions share nothing.

MNIST-M (Ganin & Lempitsky, ICML 2015, http://yaroslav.ganin.net/) is read from its own archive, ``mnist_m/`` or
``mnist_m.tar.gz``. Where that is absent, it is blended by its authors' recipe with CIFAR-10 in the place of BSDS500:
each MNIST digit is |digit − patch| in every channel, the patch a random 28×28 crop of a random photograph, training
digits over training photographs and test digits over test photographs, drawn once and for all.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.datasets

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets.files import MANIFEST, Keep, Origin, cached, described, obtain, rows_of, unpacked
from gcfed.data.sets.images import decode
from gcfed.data.sets.vision import torchvision_set
from gcfed.utils.checked import SettingError, checked
from gcfed.utils.instantiate import installed
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)

SIZE = 32
USPS = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
SVHN = "http://ufldl.stanford.edu/housenumbers/"

Digits = tuple[np.ndarray, np.ndarray]
"""uint8 images [n, 1 or 3, H, W] and int64 labels [n] of one part (train, test) of one set."""


@checked
def hwdigits(
    data_dir: str, download: bool = True, *, sets: Sequence[str] = ("mnist", "mnist_m", "usps", "svhn"),
    one_class: bool = False,
) -> FederatedDataset:  # fmt: skip
    """The sets one after another, [n, 3, 32, 32]: grey images in three equal channels, small ones enlarged bilinearly.

    The group of a sample, in both splits, is the place of its set in ``sets`` (HWDigits-4), or with ``one_class`` ten
    times the place plus the digit (HWDigits-40). ``mnist_m_blend`` asks for the blend even if MNIST-M is there.

    Raises ValueError for an unknown or repeated set or an unreadable file; FileNotFoundError for a missing one.
    """
    if not sets or not set(sets) <= set(READ) or len(set(sets)) < len(sets):
        raise SettingError("sets", f"={[*sets]} must name some of {', '.join(READ)}, each once.")
    folder, name, source = Path(data_dir), "-".join(("hwdigits", *sets)), ""
    if "mnist_m" in sets:
        source = described(folder / "mnist_m", ("mnist_m_train", "mnist_m_test"), folder / "mnist_m.tar.gz")
        # What was made of an archive that is gone by now is MNIST-M still.
        if not source and not (folder / "cache" / name / MANIFEST).exists():
            log.warning("MNIST-M: no mnist_m/ or mnist_m.tar.gz in %s; it is blended from MNIST and CIFAR-10", folder)
            sets = ["mnist_m_blend" if name == "mnist_m" else name for name in sets]
            name = "-".join(("hwdigits", *sets))
    dataset = cached(folder, name, partial(_build, sets, folder, download), source)
    if one_class:
        train, test = (replace(s, groups=s.groups * 10 + s.y) for s in (dataset.train, dataset.test))  # type: ignore
        dataset = replace(dataset, train=train, test=test)
    return dataset


def _build(sets: Sequence[str], folder: Path, download: bool, keep: Keep) -> tuple[int, str]:
    for part in ("train", "test"):
        digits = [READ[name](folder, download, part) for name in sets]
        owners = np.repeat(np.arange(len(sets)), [len(y) for _, y in digits])
        blocks = (block for images, _ in digits for block in _fitted(images))
        keep(part, blocks, np.concatenate([y for _, y in digits]), owners)
    return 10, "0123456789"


def _fitted(images: np.ndarray) -> Iterator[np.ndarray]:
    """uint8 [n, 1 or 3, H, W] in blocks [m, 3, 32, 32]; one channel fills all three."""
    for start in range(0, len(images), 4096):
        block = torch.tensor(images[start : start + 4096], dtype=torch.float32)
        if block.shape[2:] != (SIZE, SIZE):
            block = F.interpolate(block, size=(SIZE, SIZE), mode="bilinear", align_corners=False).round_()
        yield block.expand(-1, 3, -1, -1).to(torch.uint8).numpy()


# ------------------------------------------------------------------------------------------------------- the sets
def _mnist(folder: Path, download: bool, part: str) -> Digits:
    split: Split = getattr(torchvision_set("mnist", str(folder), download), part)
    return split.x, split.y


def _usps(folder: Path, download: bool, part: str) -> Digits:
    root = folder / "USPS"
    url, file, md5 = torchvision.datasets.USPS.split_list[part]
    if not (root / file).is_file():  # one that is there may be packed otherwise: its lines are what counts
        obtain(root / file, md5, url, Origin("usps", root, USPS), download)
    try:
        split = torchvision.datasets.USPS(root, train=part == "train")
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise ValueError(f"data set usps: {root / file} cannot be read ({error}): move it away.") from error
    return split.data[:, None], np.array(split.targets)


def _svhn(folder: Path, download: bool, part: str) -> Digits:
    url, file, md5 = torchvision.datasets.SVHN.split_list[part]
    path = folder / "SVHN" / file
    obtain(path, md5, url, Origin("svhn", path.parent, SVHN), download)
    installed("scipy", f"{file} is a MATLAB file, and data.dataset.sets=[svhn]")
    from scipy.io import loadmat

    arrays = loadmat(path)
    return arrays["X"].transpose(3, 2, 0, 1), arrays["y"].ravel().astype(np.int64) % 10  # its 0 is labelled 10


def _mnist_m(folder: Path, download: bool, part: str) -> Digits:
    with unpacked(folder / "mnist_m", folder / "mnist_m.tar.gz") as root:
        rows = rows_of(root / f"mnist_m_{part}_labels.txt", 2)
        paths = [root / f"mnist_m_{part}" / Path(file).name for file, *_ in rows]
        images = np.concatenate([*decode(paths, f"MNIST-M {part}", side=SIZE)])
        return images, np.array([int(label) for _, label, *_ in rows])


def _mnist_m_blend(folder: Path, download: bool, part: str) -> Digits:
    digits, labels = _mnist(folder, download, part)
    photos: np.ndarray = getattr(torchvision_set("cifar10", str(folder), download), part).x
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
