"""Data sets of the user's own folders of images."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from gcfed.data.base import FederatedDataset
from gcfed.data.dealing import held_out
from gcfed.data.sets.cache import Keep, cache_name, cached
from gcfed.data.sets.files import TESTS, TRAINS, Unread, entries, hash_files, listing
from gcfed.data.sets.names import announce, clean, number_names
from gcfed.data.sets.pixels import decode
from gcfed.utils.checked import Inside, checked
from gcfed.utils.refusal import MissingFile, Refusal

log = logging.getLogger(__name__)
Side = Annotated[int, Field(ge=1, le=10_000)]
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


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
    unread = Unread(folder)
    images_of = _listed(folder, clients, unread)
    unread.report()
    train = images_of["train"]
    _require_classes(f"data.root={root}", train, images_of.get("test"), clients)
    class_of_n, classes = number_names(np.array(train.classes))
    announce(str(folder), "classes", classes)
    if clients:
        announce(str(folder), "clients", number_names(np.array(train.clients))[1])
    else:
        _warn_of_classes_below(folder, train)
    if "test" not in images_of:
        chosen = held_out(class_of_n, test, "test")
        images_of["train"] = train.subset(np.flatnonzero(~chosen))
        images_of["test"] = train.subset(np.flatnonzero(chosen))

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        for part in ("train", "test"):
            images = images_of[part]
            pixels = decode(images.paths, f"images of {part}", size=size, note=keep.note)
            groups = number_names(np.array(images.clients))[0] if clients else None
            keep(part, pixels, np.searchsorted(classes, images.classes), groups)
        return len(classes), classes

    name = cache_name("image_folder", (str(folder), size, test, clients))
    files = [path for images in images_of.values() for path in images.paths]
    dataset = cached(data_dir, name, build, hash_files(files))
    return replace(dataset, name=folder.name)


def _listed(folder: Path, clients: bool, unread: Unread) -> dict[str, Listed]:
    """The images of ``train``, and of ``test`` if there is such a folder. ``unread`` gets all other
    entries.

    Raises ValueError if there is a folder of tests, and none to train on.
    """
    places = _places(folder)
    outside = f"not in the folder {' or '.join(place.name for place in places.values())}"
    depth = 2 if clients else 1
    images_of = {part: Listed() for part in places}
    for path in entries(folder):
        part = next((part for part, place in places.items() if path.is_relative_to(place)), None)
        if part is None:
            unread.leaves_out(path, outside)
            continue
        below = path.relative_to(places[part]).parts
        if unread.leaves_out(path, _why_no_image(below, depth)):
            continue
        images_of[part].paths.append(path)
        images_of[part].classes.append(clean(below[depth - 1]))
        images_of[part].clients.append(clean(below[0]))
    return images_of


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
