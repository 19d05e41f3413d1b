"""A user's own data: a folder of images, arrays in an ``.npz``, or whatever a function of theirs returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import IGNORE, FederatedDataset, Split
from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.dealing import held_out
from gcfed.data.sets.cache import Allocate, cached
from gcfed.data.sets.files import read_image
from gcfed.utils.number import number, word
from gcfed.utils.number import part as built
from gcfed.utils.rng import generator

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TESTS = ("test", "val", "valid", "validation")
OF_LOADERS = ("root", "path", "name", "subset", "input", "label", "size", "length")  # ``data.*`` that they read
KEYS = ("x", "y", "x_test", "y_test", "groups")


def own_data(
    *,
    dataset: Callable[[], FederatedDataset | Mapping[str, Any]],
    test: float = 0.2,
    **settings: Any,
) -> FederatedDataModule:
    """The data module of a user's own data.

    Args:
        dataset: a function without arguments; returns a :class:`FederatedDataset`, or arrays as in :func:`from_arrays`.
        test: share of the samples that become the test split where there is none; the same for all seeds.
        settings: of :class:`FederatedDataModule`; and those of ``dataset``, to which the config has passed them on.
    """
    built("data.dataset", dataset)
    settings = {key: value for key, value in settings.items() if key not in OF_LOADERS}
    return FederatedDataModule(dataset=partial(_load, dataset, test), **settings)


def unnamed(**_: Any) -> None:
    """What stands in the place of a user's function."""
    raise ValueError("data=own: name the function that loads your data, as in data.dataset._target_=mydata.load.")


def _load(load: Callable[[], Any], test: float) -> FederatedDataset:
    found, name = load(), getattr(load, "func", load).__module__
    return found if isinstance(found, FederatedDataset) else from_arrays(found, name, test)


# -------------------------------------------------------------------------------------------------------- images
def image_folder(root: str | None, data_dir: str, size: int | None = None, test: float = 0.2) -> FederatedDataset:
    """Images in a folder a class, [n, 3, H, W]: ``<root>/train/<class>/…`` and ``<root>/test/<class>/…``, or
    ``<root>/<class>/…``, of which a share is for testing. Classes are numbered in the order of their names.

    Decoded once, into the cache in ``data_dir``, and again where files have changed.

    Args:
        root: the folder.
        data_dir: where the cache is.
        size: side of the square to which images are resized; None: as they are, which must be of one size.
        test: the share of each class, drawn once and for all, where there is no folder ``test``, ``val`` or ``valid``.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a class without an image, a file that is none, images of several sizes.
    """
    number("data.size", size, 1, 10_000, whole=True, none=True)
    number("data.test", test, 0, 1, above=True, below=True)
    word("data.root", root)
    folder = Path(root or "").resolve()
    if not root or not folder.is_dir():
        raise FileNotFoundError(f"data.root={root} is no folder: give the one with a folder of images for each class.")
    if (folder / "train").is_dir():
        tests = [folder / name for name in TESTS if (folder / name).is_dir()]
        found = {part: _images(path) for part, path in zip(("train", "test"), [folder / "train", *tests], strict=False)}
    else:
        found = {"train": _images(folder)}
    classes = sorted(found["train"])
    for images in found.values():
        if len(classes) < 2 or sorted(images) != classes:
            raise ValueError(
                f"data.root={root} has folders for {_named(found['train'])}, and to test for {_named(images)}: it must "
                "have one of images for each of at least two classes."
            )
    samples = {p: [(path, c) for c, name in enumerate(classes) for path in images[name]] for p, images in found.items()}
    if "test" not in samples:
        every = samples["train"]
        chosen = held_out(np.array([c for _, c in every]), test, generator(0, "test"))
        samples = {p: [every[i] for i in np.flatnonzero(chosen == (p == "test"))] for p in ("train", "test")}
    source = written([path for part in samples.values() for path, _ in part])

    def build(allocate: Allocate) -> dict[str, Any]:
        for part, listed in samples.items():
            allocate(f"{part}_y", (len(listed),), np.int64)[:] = [c for _, c in listed]
            _decode([path for path, _ in listed], part, size, allocate)
        return {"num_classes": len(classes), "class_names": classes}

    key = hashlib.sha256(f"{folder} {size} {test}".encode()).hexdigest()[:12]
    return replace(cached(data_dir, f"image_folder_{key}", build, source), name=folder.name)


def written(files: Sequence[Path]) -> str:
    """What a cache was made of: it is made anew where a file was changed, moved, added or taken away."""
    about = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{len(about)} files, {hashlib.sha256(repr(about).encode()).hexdigest()}"


def _images(folder: Path) -> dict[str, list[Path]]:
    """The images of each class, in the order of their names; hidden files and what is no image are passed over."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name[0] != ".":
            below = (Path(parent) / name for parent, _, names in os.walk(path) for name in names)
            found[path.name] = sorted(
                p for p in below if p.suffix.lower() in SUFFIXES and p.name[0] != "." and p.is_file()
            )
    if empty := [name for name, paths in found.items() if not paths]:
        raise ValueError(f"data.root: {folder / empty[0]} holds no image: add some, or take the folder away.")
    return found


def _named(classes: Any) -> str:
    names = [*sorted(classes)[:5], *["…"] * (len(classes) > 5)]
    return ", ".join(names) or "of no folder"


def _decode(paths: list[Path], part: str, size: int | None, allocate: Allocate) -> None:
    from PIL.Image import Resampling
    from tqdm import tqdm

    x: np.ndarray | None = None
    for i, path in enumerate(tqdm(paths, desc=f"images of {part}", unit="image", disable=None)):
        image = read_image(path.read_bytes(), path)
        if size:
            image = image.resize((size, size), Resampling.BILINEAR)
        if x is None:
            x = allocate(f"{part}_x", (len(paths), 3, image.height, image.width), np.uint8)
        if x.shape[2:] != (image.height, image.width):
            raise ValueError(
                f"{path} is {image.width}×{image.height}, {paths[0]} is {x.shape[3]}×{x.shape[2]}: give all one size, "
                "as by data.size=64."
            )
        x[i] = np.asarray(image).transpose(2, 0, 1)


# -------------------------------------------------------------------------------------------------------- arrays
def arrays(path: str | None, test: float = 0.2) -> FederatedDataset:
    """The arrays of an ``.npz``, as in :func:`from_arrays`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no ``.npz`` of plain arrays, or they do not fit together.
    """
    if not word("data.path", path) or path is None or not Path(path).is_file():
        raise FileNotFoundError(f"data.path={path} is no file: numpy.savez('x.npz', x=…, y=…) writes one.")
    try:
        with np.load(path, allow_pickle=False) as file:
            content = {key: file[key] for key in file.files}
    except Exception as error:  # NumPy's own, those of zip files and of their compression
        raise ValueError(f"data.path={path} is no .npz of plain arrays ({error}): write it by numpy.savez.") from error
    return from_arrays(content, str(path), test)


def from_arrays(content: Any, name: str, test: float) -> FederatedDataset:
    """The data set that these arrays are.

    Args:
        content: by name. ``x``: images uint8 [n, C, H, W], [n, H, W, C] or [n, H, W], tokens uint8 [n, T], or vectors,
            floats [n, d]. ``y``: the class of each sample, integers or text [n]; of each token, integers [n, T], a
            negative one for none; or what to regress on, floats [n] or [n, C]. ``x_test`` and ``y_test``: the test
            split, if there is one. ``groups``: the natural client of each training sample, integers or text [n].
        name: of the file or module, for errors.
        test: the share of the samples, of each class where there are classes, that are for testing where ``x_test`` is
            not given; drawn once and for all.

    Raises:
        ValueError: an array is missing, or they do not fit together; names the file.
    """
    number("data.test", test, 0, 1, above=True, below=True)
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} gives a {type(content).__name__}: make it a dict of arrays x and y.")
    found = {key: np.asarray(value) for key, value in content.items()}
    if not {"x", "y"} <= found.keys() <= set(KEYS) or len({"x_test", "y_test"} & found.keys()) == 1:
        raise ValueError(f"{name} has {', '.join(map(str, found))}: give x and y, and perhaps {', '.join(KEYS[2:])}.")
    try:
        parts = ["", "_test"] if "x_test" in found else [""]
        y, num_classes, names = _labels([found[f"y{part}"] for part in parts])
        groups = np.unique(found["groups"], return_inverse=True)[1].astype(np.int64) if "groups" in found else None
        train, *rest = (Split(_samples(found[f"x{part}"]), y[i], None if i else groups) for i, part in enumerate(parts))
        if not rest:
            chosen = held_out(train.y, test, generator(0, "test"))
            train, rest = train.subset(~chosen), [train.subset(chosen)]
        return FederatedDataset(Path(name).stem, num_classes, train, rest[0], names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}.") from error


def _labels(parts: list[np.ndarray]) -> tuple[list[np.ndarray], int, tuple[str, ...] | None]:
    """Labels as a :class:`Split` has them, the number of classes, and their names."""
    kinds = {part.dtype.kind for part in parts}
    if kinds <= set("iuUS") and all(part.ndim == 1 for part in parts):
        values, index = np.unique(np.concatenate(parts), return_inverse=True)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return np.split(index.astype(np.int64), ends), len(values), tuple(map(str, values))
    if kinds <= set("iu"):  # of tokens
        tokens = [np.where(part < 0, IGNORE, part).astype(np.int64) for part in parts]
        return tokens, 1 + max(int(part.max(initial=0)) for part in tokens), None
    if kinds == {"f"}:
        targets = [part.reshape(len(part), -1).astype(np.float32) for part in parts]
        return targets, targets[0].shape[1], None
    raise ValueError(f"y holds {parts[0].dtype} {[*parts[0].shape]}, neither classes nor floats to regress on")


def _samples(x: np.ndarray) -> np.ndarray:
    """Samples as a :class:`Split` has them."""
    if x.dtype.kind == "f" and x.ndim == 2:
        return x.astype(np.float32)
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x  # right, or refused
