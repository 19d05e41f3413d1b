"""The raw files of a set: checked, fetched, and named where something is wrong. Nothing here deletes a file."""

from __future__ import annotations

import hashlib
import http.client
import io
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Of images; others that Pillow knows start programs (EPS)."""


@dataclass(frozen=True)
class Origin:
    """Where a set comes from, for the errors about it: its name, the folder searched, its official page."""

    name: str
    folder: Path
    page: str

    def advice(self, trouble: str, file: str, download: bool = False) -> str:
        remedy = "" if download else "run with data.dataset.download=true, or "
        return (
            f"data set {self.name}: {trouble} (searched {self.folder.resolve()}). To get it, {remedy}put {file} from "
            f"{self.page} there, or set paths.data_dir (DATA_DIR) to the folder that has it."
        )


def md5sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def obtain(path: Path, md5: str, urls: Sequence[str], origin: Origin, download: bool) -> None:
    """See that ``path`` is there with its checksum, downloading it from the first of ``urls`` that serves it.

    A download becomes visible when it is complete and right, so that neither a kill nor a second process spoils it.

    Raises FileNotFoundError if it is missing and may not, or cannot, be downloaded; ValueError for a wrong checksum.
    """
    if path.is_file():
        if (found := md5sum(path)) != md5:
            raise ValueError(
                f"data set {origin.name}: {path} has the wrong checksum (md5 {found} instead of {md5}), perhaps from a "
                "download cut short: move it away, then run with data.dataset.download=true"
            )
        return
    if not download:
        raise FileNotFoundError(origin.advice(f"{path.name} is missing", path.name))

    from torchvision.datasets.utils import download_url  # seconds to import, and most runs read the cache

    path.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    with tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent) as stage:
        for url in urls:
            try:
                download_url(url, stage, path.name, md5)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                failures.append(f"{url}: {error}")
            else:
                (Path(stage) / path.name).replace(path)
                return
    trouble = f"{path.name} could not be downloaded ({'; '.join(failures)})"
    raise FileNotFoundError(origin.advice(trouble, path.name, download=True))


def is_plain(name: object) -> bool:
    """Whether it is a file's bare name, which cannot lead out of its folder."""
    return isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*", name) is not None


def read_image(content: bytes, path: str | Path, size: tuple[int, int] | None = None) -> Image:
    """An image in RGB; its size is known before its pixels are decoded.

    Raises ValueError, with its path, for a file that is no image, has more than 8 bits a channel, is far larger than
    photographs are, or is not of ``size``, (width, height).
    """
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        if size and image.size != size:
            raise ValueError("it is {}×{}, not {}×{}".format(*image.size, *size))
        if image.mode[0] in "IF":
            raise ValueError("it has more than 8 bits a channel")
        return image.convert("RGB")
    except Exception as error:  # whatever Pillow raises over a broken file
        reason = str(error).partition(" <")[0]  # without the address of the buffer
        raise ValueError(f"{path} is no readable image ({reason}): put a sound one in its place.") from error


def decode(
    images: Iterable[tuple[str | Path, Image]],
    count: int,
    what: str,
    *,
    size: int | None = None,
    bicubic: bool = False,
    allocate: Callable[[tuple[int, ...]], np.ndarray] = lambda shape: np.empty(shape, np.uint8),
) -> np.ndarray:
    """So many images, each with its name for errors, as uint8 [count, C, H, W], under a bar called ``what``.

    Args:
        size: side of the square to which they are resized, bilinearly or ``bicubic``; None: all are of one size.
        allocate: makes the array of this shape.

    Raises ValueError, with the names, for images of several sizes.
    """
    from PIL.Image import Resampling
    from tqdm import tqdm

    x, first = np.zeros((0, 0, 0, 0)), None
    for i, (name, image) in enumerate(tqdm(images, desc=what, total=count, unit="image", disable=None)):
        if size:
            image = image.resize((size, size), Resampling.BICUBIC if bicubic else Resampling.BILINEAR)
        pixels = np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)
        if first is None:
            x, first = allocate((count, *pixels.shape)), name
        if pixels.shape != x.shape[1:]:
            raise ValueError(
                f"{name} is {image.width}×{image.height}, {first} is {x.shape[3]}×{x.shape[2]}: give all one size, as "
                "by data.size=64."
            )
        x[i] = pixels
    return x
