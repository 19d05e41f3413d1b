"""The raw files of a set: checked, fetched, unpacked, decoded, and named where something is wrong. Nothing here deletes
a file.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import re
import shutil
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

    def missing(self, trouble: str, file: str, download: bool = False) -> FileNotFoundError:
        """The error that names the trouble and the way out; ``download``: whether it was tried, or cannot be."""
        remedy = "" if download else "run with data.dataset.download=true, or "
        return FileNotFoundError(
            f"data set {self.name}: {trouble} (searched {self.folder.resolve()}). To get it, {remedy}put {file} from "
            f"{self.page} there, or set paths.data_dir (DATA_DIR) to the folder that has it."
        )

    def require(self, paths: Sequence[Path], file: str) -> None:
        """Raises FileNotFoundError where some of these are not there."""
        if absent := [path for path in paths if not path.is_file()]:
            more = f", and {len(absent) - 1:,} more" * (len(absent) > 1)
            raise self.missing(f"{absent[0]} is missing{more}", file, download=True)


def obtain(path: Path, md5: str, urls: Sequence[str], origin: Origin, download: bool) -> None:
    """See that ``path`` is there with its checksum, downloading it from the first of ``urls`` that serves it.

    A download becomes visible when it is complete and right, so that neither a kill nor a second process spoils it.

    Raises FileNotFoundError if it is missing and may not, or cannot, be downloaded; ValueError for a wrong checksum.
    """
    if path.is_file():
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != md5:
            raise ValueError(
                f"data set {origin.name}: {path} has the wrong checksum (md5 {found} instead of {md5}), perhaps from a "
                "download cut short: move it away, then run with data.dataset.download=true"
            )
        return
    if not download:
        raise origin.missing(f"{path.name} is missing", path.name)

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
    raise origin.missing(f"{path.name} could not be downloaded ({'; '.join(failures)})", path.name, download=True)


@contextmanager
def unpacked(folder: Path, archive: Path, page: str) -> Iterator[Path]:
    """The folder, or where it is not there its archive, which holds it, unpacked for as long as it is read.

    Raises ValueError for an archive that cannot be read.
    """
    if folder.is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=archive.parent) as stage:
        safely = {} if archive.suffix == ".zip" else {"filter": "data"}
        try:
            shutil.unpack_archive(archive, stage, **safely)  # type: ignore[arg-type]
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise ValueError(f"{archive} cannot be read ({error}): get it anew from {page}.") from error
        try:
            yield Path(stage) / folder.name
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(str(error).replace(stage, str(archive))) from error


def described(folder: Path, parts: Sequence[str], archive: Path) -> str:
    """What would be read, told cheaply: a part of the images may give way to all of them, or an archive to another.

    Empty without either. ``parts``: patterns of the folders of images to train on and to test on.
    """
    if folder.is_dir():
        counts = [sum(1 for place in folder.glob(part) for _ in os.scandir(place)) for part in parts]
        return f"{folder.name}/ with {counts[0]} training and {counts[1]} test images"
    return f"{archive.name} of {archive.stat().st_size} bytes" if archive.is_file() else ""


def is_plain(name: object) -> bool:
    """Whether it is a file's bare name, which cannot lead out of its folder."""
    return isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*", name) is not None


def read_image(path: Path, side: int | None = None) -> Image:
    """An image in RGB; its size is known before its pixels are decoded.

    Raises ValueError, with its path, for a file that is no image, has more than 8 bits a channel, is far larger than
    photographs are, or is no square of this side.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            image = Image.open(io.BytesIO(path.read_bytes()), formats=FORMATS)
        if side and image.size != (side, side):
            raise ValueError(f"it is {image.width}×{image.height}, not {side}×{side}")
        if image.mode[0] in "IF":
            raise ValueError("it has more than 8 bits a channel")
        return image.convert("RGB")
    except Exception as error:  # whatever Pillow raises over a broken file
        reason = str(error).partition(" <")[0]  # without the address of the buffer
        raise ValueError(f"{path} is no readable image ({reason}): put a sound one in its place.") from error


def read_images(paths: Iterable[Path], side: int | None = None) -> Iterator[tuple[str, Image]]:
    """Each image as :func:`read_image` reads it, and its path for errors."""
    return ((str(path), read_image(path, side)) for path in paths)


def decode(
    images: Iterable[tuple[str, Image]], count: int, what: str, *, size: int | None = None, bicubic: bool = False,
    room: Callable[[tuple[int, ...]], np.ndarray] = lambda shape: np.empty(shape, np.uint8),
) -> np.ndarray:  # fmt: skip
    """So many images, each with its name for errors, as uint8 [count, C, H, W], under a bar called ``what``.

    Args:
        size: side of the square to which they are resized, bilinearly or ``bicubic``; None: all are of one size.
        room: makes the array of this shape.

    Raises ValueError, with the names, for images of several sizes.
    """
    from PIL.Image import Resampling
    from tqdm import tqdm

    x, first = np.zeros((0, 0, 0, 0)), ""
    for i, (name, image) in enumerate(tqdm(images, desc=what, total=count, unit="image", disable=None)):
        if size:
            image = image.resize((size, size), Resampling.BICUBIC if bicubic else Resampling.BILINEAR)
        pixels = np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)
        if i == 0:
            x, first = room((count, *pixels.shape)), name
        if pixels.shape != x.shape[1:]:
            raise ValueError(
                f"{name} is {image.width}×{image.height}, {first} is {x.shape[3]}×{x.shape[2]}: give all one size, as "
                "by data.size=64."
            )
        x[i] = pixels
    return x
