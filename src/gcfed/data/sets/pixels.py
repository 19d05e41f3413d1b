"""Images as arrays."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps
from PIL.Image import Resampling
from tqdm import tqdm

from gcfed.data.sets.files import Note, listing
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)
# not EPS, for which Pillow starts a program
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
open_image = partial(Image.open, formats=FORMATS)  # does not decode the pixels yet
GREY_MODES = ("1", "L")


class Picture(NamedTuple):
    """An image that is not opened yet.

    Attributes:
        name: for errors.
        open: returns the image.
    """

    name: str
    open: Callable[[], Image.Image]


def pictures_of(paths: Iterable[Path]) -> list[Picture]:
    """The images in these files."""
    return [Picture(str(path), partial(open_image, path)) for path in paths]


def decode(
    pictures: Sequence[Picture],
    what: str,
    *,
    size: int | None = None,
    resampling: Resampling = Resampling.BILINEAR,
    grey: bool | None = False,
    note: Note = log.log,
) -> Iterator[np.ndarray]:
    """Yields each image as uint8 [1, C, H, W] and shows a progress bar with the title ``what``.

    Images are turned upright by their EXIF data. Transparency, all frames but the first, and the
    lower 8 of 16 bits are dropped; ``note`` gets the number of such images.

    Args:
        size: side of the square to which images are resized by ``resampling``; None: all must have
            one size.
        grey: one channel instead of three; None: if the first image has no colours.

    Raises Refusal with the name of a file that is no image, has over 8 bits in its only
    channel, or another size or colours.
    """
    dropped: defaultdict[str, list[str]] = defaultdict(list)
    first = ""  # the name of the first image
    first_size = (0, 0)
    for name, open_picture in tqdm(pictures, desc=what, unit="image", disable=None):
        try:
            source = open_picture()
            for loss in _losses(source):
                dropped[loss].append(name)
            image = ImageOps.exif_transpose(source)
            if _is_transparent(image):
                dropped["are transparent, and their transparency is dropped"].append(name)
            if grey is None:
                grey = image.mode in GREY_MODES
            image = _converted(image, grey)
        except Exception as error:  # Pillow raises many types for broken images
            raise Refusal(
                f"{name} is no readable image ({error}): put a sound one in its place."
            ) from error
        if size:
            image = image.resize((size, size), resampling)
        if not first:
            first = name
            first_size = image.size
        if image.size != first_size:
            raise Refusal(
                f"{name} is {_sides(image.size)}, {first} is {_sides(first_size)}: give all one"
                " size, as by data.size=64."
            )
        yield np.asarray(image).reshape(1, image.height, image.width, -1).transpose(0, 3, 1, 2)
    for loss, names in dropped.items():
        note(logging.WARNING, f"{what}: {len(names)} {loss}: {listing(names)}")


def _sides(size: tuple[int, int]) -> str:
    width, height = size
    return f"{width}×{height}"


def _losses(image: Image.Image) -> Iterator[str]:
    """What the array of an image that is not yet decoded will lack."""
    if getattr(image, "is_animated", False):
        yield "have several frames, and only the first is read"
    if any(map(_has_16_bits, getattr(image, "tile", ()))):
        yield "have 16 bits a channel, and the lower 8 are dropped"


def _has_16_bits(tile: Any) -> bool:
    """Whether Pillow's description of the pixels in a file names 16 bits a channel."""
    codec, _, _, options, *_ = tile
    return ";16" in str(options) or (codec == "ppm" and options[1] > 255)


def _is_transparent(image: Image.Image) -> bool:
    """Whether a pixel is not opaque."""
    if not image.has_transparency_data or image.mode[0] in "IF":
        return False
    alpha = np.asarray(image.convert("RGBA").getchannel("A"))
    return bool(alpha.min() < 255)


def _converted(image: Image.Image, grey: bool) -> Image.Image:
    """The image with 8 bits in one channel (``grey``) or in three.

    Raises Refusal if this would change what it shows.
    """
    if image.mode[0] in "IF":
        raise Refusal(f"Pillow's mode {image.mode} has more than 8 bits a channel: convert it to 8")
    if grey and image.mode not in GREY_MODES:
        raise Refusal(
            "it has colours, or is transparent, and the first one is grey: convert one of them"
        )
    if "transparency" in image.info:  # Pillow would warn about a palette
        image = image.convert("RGBA")
    return image.convert("L" if grey else "RGB")
