"""Images as arrays, and data sets of the user's own folders of images."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image, ImageOps
from PIL.Image import Resampling
from pydantic import Field
from tqdm import tqdm

from gcfed.data.base import FederatedDataset
from gcfed.data.dealing import held_out
from gcfed.data.sets.files import TESTS, TRAINS, Keep, cached, listing, written
from gcfed.utils.checked import Inside, checked

log = logging.getLogger(__name__)
Side = Annotated[int, Field(ge=1, le=10_000)]
# not EPS, for which Pillow starts a program
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
open_image = partial(Image.open, formats=FORMATS)  # does not decode the pixels yet


def decode(
    images: Sequence[Any],
    what: str,
    *,
    opened: Callable[[Any], Image.Image] = open_image,
    named: Callable[[Any], str] = str,
    size: int | None = None,
    bicubic: bool = False,
    grey: bool | None = False,
) -> Iterator[np.ndarray]:
    """Yields each image as uint8 [1, C, H, W] and shows a progress bar with the title ``what``.

    Images are turned upright by their EXIF data. Transparency is dropped, and all frames but the
    first.

    Args:
        images: paths, or objects from which ``opened`` makes images and ``named`` makes names for
            errors.
        size: side of the square to which images are resized, bilinearly or ``bicubic``; None: all
            must have one size.
        grey: one channel instead of three; None: if the first image has no colours.

    Raises ValueError with the name of a file that is no image, has over 8 bits a channel, or
    another size or colours.
    """
    first: tuple[str, tuple[int, int]] | None = None
    for entry in tqdm(images, desc=what, unit="image", disable=None):
        name = named(entry)
        try:
            image = ImageOps.exif_transpose(opened(entry))
            grey = image.mode in ("1", "L") if grey is None else grey
            if grey and image.mode not in ("1", "L"):
                raise ValueError(
                    "it has colours, or is transparent, and the first one is grey: convert one of"
                    " them"
                )
            if image.mode[0] in "IF":
                raise ValueError(
                    f"Pillow's mode {image.mode} has more than 8 bits a channel: convert it to 8"
                )
            if "transparency" in image.info:  # Pillow would warn about a palette
                image = image.convert("RGBA")
            image = image.convert("L" if grey else "RGB")
        except Exception as error:  # Pillow raises many types for broken images
            raise ValueError(
                f"{name} is no readable image ({error}): put a sound one in its place."
            ) from error
        if size:
            image = image.resize(
                (size, size), Resampling.BICUBIC if bicubic else Resampling.BILINEAR
            )
        first = first or (name, image.size)
        if image.size != first[1]:
            here, there = (f"{width}×{height}" for width, height in (image.size, first[1]))
            raise ValueError(
                f"{name} is {here}, {first[0]} is {there}: give all one size, as by data.size=64."
            )
        yield np.asarray(image).reshape(1, image.height, image.width, -1).transpose(0, 3, 1, 2)


@checked
def image_folder(
    root: str | None,
    data_dir: str,
    size: Side | None = None,
    test: Inside = 0.2,
    clients: bool = False,
) -> FederatedDataset:
    """Images with one folder per class, [n, 3, H, W]: ``<root>/train/<class>/…`` and
    ``<root>/test/<class>/…``, or only ``<root>/<class>/…``. Classes are numbered in the order of
    their names.

    Images are decoded into the cache in ``data_dir``, and again when files change.

    Args:
        size: side of the square to which images are resized; None: all images must have one size.
        test: share of each class that becomes the test split if there is no folder ``test``,
            ``val`` or ``valid``.
        clients: each client has a folder above the classes, ``<client>/<class>/…``, also in
            ``train`` and ``test``. A client need not have all classes.

    Raises FileNotFoundError for no such folder; ValueError for a file that is no image, or images
    of several sizes.
    """
    folder = Path(root or "").resolve()
    if not root or not folder.is_dir():
        raise FileNotFoundError(
            f"data.root={root} is no folder: give the one with a folder of images for each class."
        )
    inside = {path.name.lower(): path for path in sorted(folder.glob("[!.]*")) if path.is_dir()}
    trains, tests = (
        [inside[name] for name in names if name in inside] for names in (TRAINS, TESTS)
    )
    if tests and not trains:
        raise ValueError(
            f"data.root={root} has a folder {tests[0].name}, but none to train on: call it train."
        )
    found = [_listed(place, clients) for place in [*trains[:1], *tests[:1]] or [folder]]
    files = [path for images in found for path in images[:, 0]]
    if left := sorted({path for path in folder.rglob("*") if path.is_file()} - {*files}):
        shown = listing([str(path.relative_to(folder)) for path in left])
        log.warning(
            "%s: %d files are not read, because they are no images of a class: %s",
            folder,
            len(left),
            shown,
        )
    classes, tested = (sorted({*images[:, 1]}) for images in (found[0], found[-1]))
    if len(classes) < 2 or tested != classes:
        raise ValueError(
            f"data.root={root} has images of {listing(classes)}, and test images of"
            f" {listing(tested)}: it must have a folder for each of at least two"
            f" classes{', below a folder for each client' * clients}."
        )
    below = [{path.parent.name for path in found[0][found[0][:, 1] == kind, 0]} for kind in classes]
    if len(same := sorted(set.intersection(*below))) > 1:
        text = (
            "%s: %s are read as classes. If %s are the classes, set data.clients=true or use"
            " folders train, test"
        )
        log.warning(text, folder, listing(classes), listing(same))
    if len(found) == 1:
        chosen = held_out(found[0][:, 1], test, "test")
        found = [found[0][~chosen], found[0][chosen]]

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        for part, images in zip(("train", "test"), found, strict=True):
            paths, kinds, owners = images.T
            groups = np.unique(owners, return_inverse=True)[1] if clients else None
            y = np.searchsorted(classes, kinds.astype(str))
            keep(part, decode(paths, f"images of {part}", size=size), y, groups)
        return len(classes), classes

    key = hashlib.sha256(
        f"{folder} {size} {test}{' clients' * clients} upright".encode()
    ).hexdigest()[:12]
    return replace(cached(data_dir, f"image_folder_{key}", build, written(files)), name=folder.name)


def _listed(folder: Path, clients: bool) -> np.ndarray:
    """The path, class and client of each image, [n, 3], in the order of their names."""
    listed = [
        (path, kind.name, kind.parent.name)
        for kind in filter(Path.is_dir, sorted(folder.glob("[!.]*/[!.]*" if clients else "[!.]*")))
        for path in sorted(kind.rglob("*"))
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and "/." not in path.relative_to(folder).as_posix()
    ]
    return np.array(listed, object).reshape(-1, 3)
