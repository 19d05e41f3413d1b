"""Data sets of the user's own folders of images."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pandas import DataFrame
from pydantic import Field

from gcfed.data.base import FederatedDataset
from gcfed.data.dealing import held_out
from gcfed.data.sets.cache import SplitWriter, cache_name, cached
from gcfed.data.sets.files import (
    TESTS,
    TRAINS,
    entries,
    hash_files,
    listing,
    note_unread,
    why_unread,
)
from gcfed.data.sets.names import announce, clean, number_names
from gcfed.data.sets.pixels import decode, pictures_of
from gcfed.utils.checked import Inside, checked
from gcfed.utils.refusal import MissingFile, Refusal

log = logging.getLogger(__name__)
Side = Annotated[int, Field(ge=1, le=10_000)]
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


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

    Raises MissingFile for no such folder; Refusal for a file that is no image, images of
    several sizes, or a class without training or test images.
    """
    folder = Path(root or "").resolve()
    if not root or not folder.is_dir():
        raise MissingFile(
            f"data.root={root or 'null'} is no folder: give the one with a folder of images for"
            " each class."
        )
    images = _listed(folder, clients)
    _require_classes(f"data.root={root}", images, clients)
    class_of_n, classes = number_names(images["class"].to_numpy(np.str_))
    announce(str(folder), "classes", classes)
    client_of_n = None
    if clients:
        client_of_n, names = number_names(images["client"].to_numpy(np.str_))
        announce(str(folder), "clients", names)
    is_test = (images["split"] == "test").to_numpy()
    if not is_test.any():
        is_test = held_out(class_of_n, test, "test")

    def build(keep: SplitWriter) -> tuple[int, Sequence[str]]:
        for part, chosen in (("train", ~is_test), ("test", is_test)):
            pictures = pictures_of(images["path"][chosen])
            pixels = decode(pictures, f"images of {part}", size=size, note=keep.note)
            groups = None if client_of_n is None else client_of_n[chosen]
            keep(part, pixels, class_of_n[chosen], groups)
        return len(classes), classes

    name = cache_name("image_folder", (str(folder), size, test, clients))
    dataset = cached(data_dir, name, build, hash_files(images["path"].tolist()))
    return replace(dataset, name=folder.name)


def _listed(folder: Path, clients: bool) -> DataFrame:
    """The images of all splits, with their columns path, split, class and client. Logs which
    entries are no such images.

    Raises Refusal if there is a folder of tests, and none to train on.
    """
    places = _places(folder)
    outside = f"not in the folder {' or '.join(place.name for place in places.values())}"
    depth = 2 if clients else 1
    rows = []
    why_left = {}
    for path in entries(folder):
        reason = why_unread(path, folder)
        split = next((split for split, at in places.items() if path.is_relative_to(at)), None)
        if split is None:
            why_left[path] = reason or outside
            continue
        below = path.relative_to(places[split]).parts
        reason = reason or _why_no_image(below, depth)
        if reason:
            why_left[path] = reason
        else:
            rows.append((path, split, clean(below[depth - 1]), clean(below[0])))
    note_unread(folder, why_left)
    return DataFrame(rows, columns=["path", "split", "class", "client"])


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


def _require_classes(key: str, images: DataFrame, clients: bool) -> None:
    """Raises Refusal for fewer than two classes, or for one that a split lacks."""
    classes = {split: {*rows["class"]} for split, rows in images.groupby("split")}
    trained = classes.get("train", set())
    if len(trained) < 2:
        raise Refusal(
            f"{key} has images of {listing(sorted(trained))}: it must have a folder for each of at"
            f" least two classes{', below a folder for each client' * clients}."
        )
    tested = classes.get("test", trained)
    if trained != tested:
        part = "test" if trained - tested else "training"
        missing = sorted(trained - tested or tested - trained)
        raise Refusal(
            f"{key}: the {part} split has no image of {listing(missing)}: add one, or take the"
            " folder of tests away, so that data.test=0.2 of each class become the test split."
        )
