"""Images as arrays, and data sets of the user's own folders of images."""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from gcfed.data.sets.files import (
    TESTS,
    TRAINS,
    Keep,
    Note,
    cached,
    entries,
    listing,
    report_unread,
    why_unread,
    written,
)
from gcfed.data.sets.names import announce, clean, numbered
from gcfed.utils.checked import Inside, checked
from gcfed.utils.refusal import MissingFile, Refusal

log = logging.getLogger(__name__)
Side = Annotated[int, Field(ge=1, le=10_000)]
# not EPS, for which Pillow starts a program
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
open_image = partial(Image.open, formats=FORMATS)  # does not decode the pixels yet
GREY_MODES = ("1", "L")


# ---------------------------------------------------------------------------------------- decoding
def decode(
    images: Sequence[Any],
    what: str,
    *,
    opened: Callable[[Any], Image.Image] = open_image,
    named: Callable[[Any], str] = str,
    size: int | None = None,
    bicubic: bool = False,
    grey: bool | None = False,
    note: Note = log.log,
) -> Iterator[np.ndarray]:
    """Yields each image as uint8 [1, C, H, W] and shows a progress bar with the title ``what``.

    Images are turned upright by their EXIF data. Transparency, all frames but the first, and the
    lower 8 of 16 bits are dropped; ``note`` gets the number of such images.

    Args:
        images: paths, or objects from which ``opened`` makes images and ``named`` makes names for
            errors.
        size: side of the square to which images are resized, bilinearly or ``bicubic``; None: all
            must have one size.
        grey: one channel instead of three; None: if the first image has no colours.

    Raises ValueError with the name of a file that is no image, has over 8 bits in its only
    channel, or another size or colours.
    """
    how = Resampling.BICUBIC if bicubic else Resampling.BILINEAR
    dropped: defaultdict[str, list[str]] = defaultdict(list)
    first = ""  # the name of the first image
    first_size = (0, 0)
    for entry in tqdm(images, desc=what, unit="image", disable=None):
        name = named(entry)
        try:
            source = opened(entry)
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
            image = image.resize((size, size), how)
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

    Raises ValueError if this would change what it shows.
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


# ----------------------------------------------------------------------------------------- folders
@dataclass
class Listed:
    """The images of one split: path, class and client of each."""

    paths: list[Path] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, keep: np.ndarray) -> "Listed":
        """The images at these positions."""
        chosen = Listed()
        for i in keep.tolist():
            chosen.paths.append(self.paths[i])
            chosen.classes.append(self.classes[i])
            chosen.clients.append(self.clients[i])
        return chosen


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

    Images are decoded into the cache in ``data_dir``, and again when files change. The log names
    the classes, and counts the entries of the folder that are not read.

    Args:
        size: side of the square to which images are resized; None: all images must have one size.
        test: share of each class that becomes the test split if there is no folder ``test``,
            ``val`` or ``valid``.
        clients: each client has a folder above the classes, ``<client>/<class>/…``, also in
            ``train`` and ``test``. A client need not have all classes.

    Raises FileNotFoundError for no such folder; ValueError for a file that is no image, images of
    several sizes, or a class without training or test images.
    """
    folder = Path(root or "").resolve()
    if not root or not folder.is_dir():
        raise MissingFile(
            f"data.root={root} is no folder: give the one with a folder of images for each class."
        )
    found, left = _listed(folder, clients)
    report_unread(folder, left)
    train = found["train"]
    _require_classes(f"data.root={root}", train, found.get("test"), clients)
    class_of_n, classes = numbered(np.array(train.classes))
    announce(str(folder), "classes", classes)
    if clients:
        announce(str(folder), "clients", numbered(np.array(train.clients))[1])
    else:
        _warn_of_classes_below(folder, train)
    if "test" not in found:
        chosen = held_out(class_of_n, test, "test")
        found["train"] = train.subset(np.flatnonzero(~chosen))
        found["test"] = train.subset(np.flatnonzero(chosen))

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        for part in ("train", "test"):
            images = found[part]
            pixels = decode(images.paths, f"images of {part}", size=size, note=keep.note)
            groups = numbered(np.array(images.clients))[0] if clients else None
            keep(part, pixels, np.searchsorted(classes, images.classes), groups)
        return len(classes), classes

    settings = repr((str(folder), size, test, clients))
    key = hashlib.sha256(settings.encode()).hexdigest()[:12]
    files = [path for images in found.values() for path in images.paths]
    dataset = cached(data_dir, f"image_folder_{key}", build, written(files))
    return replace(dataset, name=folder.name)


def _listed(folder: Path, clients: bool) -> tuple[dict[str, Listed], dict[str, list[Path]]]:
    """The images of ``train``, and of ``test`` if there is such a folder; and all other entries, by
    the reason why they are not read.

    Raises ValueError if there is a folder of tests, and none to train on.
    """
    places = _places(folder)
    outside = f"not in the folder {' or '.join(place.name for place in places.values())}"
    depth = 2 if clients else 1
    found = {part: Listed() for part in places}
    left: defaultdict[str, list[Path]] = defaultdict(list)
    for path in entries(folder):
        part = next((part for part, place in places.items() if path.is_relative_to(place)), None)
        if part is None:
            left[why_unread(path, folder) or outside].append(path)
            continue
        below = path.relative_to(places[part]).parts
        reason = why_unread(path, folder) or _why_no_image(below, depth)
        if reason:
            left[reason].append(path)
            continue
        found[part].paths.append(path)
        found[part].classes.append(clean(below[depth - 1]))
        found[part].clients.append(clean(below[0]))
    return found, left


def _places(folder: Path) -> dict[str, Path]:
    """The folders of the splits ``train`` and ``test``; or the folder itself, as ``train``."""
    inside = {}
    for path in sorted(folder.glob("[!.]*")):
        if path.is_dir():
            inside[path.name.lower()] = path
    places = {}
    for part, names in (("train", TRAINS), ("test", TESTS)):
        present = [inside[name] for name in names if name in inside]
        if present:
            places[part] = present[0]
    if "test" in places and "train" not in places:
        raise Refusal(
            f"data.root={folder} has a folder {places['test'].name}, but none to train on: call it"
            " train."
        )
    return places or {"train": folder}


def _why_no_image(below: Sequence[str], depth: int) -> str:
    """Why a file with this path in its split is no image of a class; empty if it is one."""
    if not below[-1].lower().endswith(SUFFIXES):
        return f"the name ends in none of {', '.join(SUFFIXES)}"
    if not all(map(clean, below[:depth])):
        return "in a folder with a blank name"
    if len(below) <= depth:
        return "not in a folder of a class" + " in a folder of a client" * (depth == 2)
    return ""


def _require_classes(key: str, train: Listed, test: Listed | None, clients: bool) -> None:
    """Raises ValueError for fewer than two classes, or for one that a split lacks."""
    trained = sorted(set(train.classes))
    if len(trained) < 2:
        raise Refusal(
            f"{key} has images of {listing(trained)}: it must have a folder for each of at least"
            f" two classes{', below a folder for each client' * clients}."
        )
    if test is None:
        return
    tested = set(test.classes)
    untested = [name for name in trained if name not in tested]
    untrained = sorted(tested - {*trained})
    if untested or untrained:
        part = "test" if untested else "training"
        raise Refusal(
            f"{key}: the {part} split has no image of {listing(untested or untrained)}: add one, or"
            " take the folder of tests away, so that data.test=0.2 of each class become the test"
            " split."
        )


def _warn_of_classes_below(folder: Path, train: Listed) -> None:
    """Warns if all folders that are read as classes have the same folders inside."""
    below: dict[str, set[str]] = {}
    for path, name in zip(train.paths, train.classes, strict=True):
        below.setdefault(name, set()).add(path.parent.name)
    same = sorted(set.intersection(*below.values()))
    if len(same) > 1:
        log.warning(
            "%s: %s are read as classes. If %s are the classes, set data.clients=true or use"
            " folders train, test",
            folder,
            listing(sorted(below)),
            listing(same),
        )
