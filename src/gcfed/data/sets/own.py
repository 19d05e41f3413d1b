"""A user's own data: a folder of images, arrays in an ``.npz``, or whatever a function of theirs returns."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from gcfed.data.base import IGNORE, FederatedDataset, Split
from gcfed.data.datamodule import FederatedDataModule, refuse_call
from gcfed.data.dealing import held_out, tell_absent
from gcfed.data.sets.files import Keep, cached, decode
from gcfed.utils.checked import Inside, SettingError, checked
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)
Side = Annotated[int, Field(ge=1, le=10_000)]
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TESTS = ("test", "val", "valid", "validation")
KEYS = ("x", "y", "x_test", "y_test", "groups")


@checked
def own_data(
    *, dataset: Callable[[], FederatedDataset | Mapping[str, Any]], test: Inside = 0.2, **settings: Any
) -> FederatedDataModule:
    """The data module of a user's own data.

    Args:
        dataset: returns a :class:`FederatedDataset`, or arrays as in :func:`from_arrays`.
        test: share of the samples that become the test split where there is none; the same for all seeds.
        settings: of :class:`FederatedDataModule`; and those of ``dataset``, to which the config has passed them on.

    Raises SettingError for an argument of ``dataset`` that is missing or that it does not take.
    """
    refuse_call(dataset)
    passed_on = settings.keys() & getattr(dataset, "keywords", {}).keys() - signature(FederatedDataModule).parameters
    for key in passed_on:
        del settings[key]

    def load() -> FederatedDataset:
        try:
            found = dataset()
        except SettingError as error:
            key = {"groups": "partition.by"} | {key: f"data.{key}" for key in passed_on}
            if error.name not in key:
                raise
            raise ValueError(f"{key[error.name]}{error.rest}") from None
        name = getattr(dataset, "func", dataset).__module__
        return found if isinstance(found, FederatedDataset) else from_arrays(found, name, test)

    return FederatedDataModule(dataset=load, **settings)


def unnamed(**_: Any) -> None:
    """What stands in the place of a user's function."""
    raise ValueError("data=own: name the function that loads your data, as in data.dataset._target_=mydata.load.")


# -------------------------------------------------------------------------------------------------------- images
@checked
def image_folder(
    root: str | None, data_dir: str, size: Side | None = None, test: Inside = 0.2, clients: bool = False
) -> FederatedDataset:
    """Images in a folder a class, [n, 3, H, W]: ``<root>/train/<class>/…`` and ``<root>/test/<class>/…``, or
    ``<root>/<class>/…``, of which a share is for testing. Classes are numbered in the order of their names.

    Decoded once, into the cache in ``data_dir``, and again where files have changed.

    Args:
        size: side of the square to which images are resized; None: as they are, which must be of one size.
        test: the share of each class, drawn once and for all, where there is no folder ``test``, ``val`` or ``valid``.
        clients: there is a folder a client above those of the classes, ``<client>/<class>/…``, also in ``train`` and
            ``test``: a natural client, which need not have all classes.

    Raises FileNotFoundError for no such folder; ValueError for a class without an image, a file that is none, or images
    of several sizes.
    """
    folder = Path(root or "").resolve()
    if not root or not folder.is_dir():
        raise FileNotFoundError(f"data.root={root} is no folder: give the one with a folder of images for each class.")
    tests = [folder / name for name in TESTS if (folder / name).is_dir()]
    places = [folder / "train", *tests[:1]] if (folder / "train").is_dir() else [folder]
    found = [_listed(place, clients) for place in places]
    names = [sorted({*images[:, 1]}) for images in found]
    classes = names[0]
    if len(classes) < 2 or names[-1] != classes:
        raise ValueError(
            f"data.root={root} has folders for {_named(classes)}, and to test for {_named(names[-1])}: it must have "
            f"one of images for each of at least two classes{', below one for each client' * clients}."
        )
    if len(found) == 1:
        chosen = held_out(found[0][:, 1], test, generator(0, "test"))
        tell_absent(found[0][:, 2] if clients else None, chosen, folder.name, "test")
        found = [found[0][~chosen], found[0][chosen]]

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        for part, images in zip(("train", "test"), found, strict=True):
            paths, kinds, owners = images.T
            groups = np.unique(owners, return_inverse=True)[1] if clients else None
            y = np.searchsorted(classes, kinds.astype(str))
            keep(part, decode(paths, f"images of {part}", size=size), y, groups)
        return len(classes), classes

    key = hashlib.sha256(f"{folder} {size} {test}{' clients' * clients}".encode()).hexdigest()[:12]
    source = written([path for images in found for path in images[:, 0]])
    return replace(cached(data_dir, f"image_folder_{key}", build, source), name=folder.name)


def written(files: Sequence[Path]) -> str:
    """What a cache was made of: it is made anew where a file was changed, moved, added or taken away."""
    about = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{len(about)} files, {hashlib.sha256(repr(about).encode()).hexdigest()}"


def _listed(folder: Path, clients: bool) -> np.ndarray:
    """Each image's path, class and client, [n, 3], in the order of their names; hidden files and what is no image are
    passed over.
    """
    listed: list[tuple[Path, str, str]] = []
    for kind in filter(Path.is_dir, sorted(folder.glob("[!.]*/[!.]*" if clients else "[!.]*"))):
        files = (path for path in kind.rglob("*") if path.suffix.lower() in SUFFIXES and path.name[0] != ".")
        images = [(path, kind.name, kind.parent.name) for path in sorted(files) if path.is_file()]
        if not images:
            raise ValueError(f"data.root: {kind} holds no image: add some, or take the folder away.")
        listed += images
    return np.array(listed, object).reshape(-1, 3)


def _named(classes: list[str]) -> str:
    return ", ".join([*classes[:5], *["…"] * (len(classes) > 5)]) or "of no folder"


# -------------------------------------------------------------------------------------------------------- arrays
@checked
def arrays(path: str | None, test: Inside = 0.2) -> FederatedDataset:
    """The arrays of an ``.npz``, as in :func:`from_arrays`.

    Raises FileNotFoundError for no such file; ValueError where it is no ``.npz`` of plain arrays that fit together.
    """
    if path is None or not Path(path).is_file():
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
        content: by name, arrays or what NumPy makes arrays of, as pandas' columns. ``x``: images uint8 [n, C, H, W],
            [n, H, W, C] or [n, H, W], tokens uint8 [n, T], or vectors, floats [n, d]. ``y``: the class of each sample,
            integers or text [n]; of each token, integers [n, T], a negative one for none; or what to regress on, floats
            [n] or [n, C]. ``x_test`` and ``y_test``: the test split, if there is one. ``groups``: the natural client of
            each training sample, integers or text [n].
        name: of the file or module, for errors.
        test: the share of the samples, of each class where there are classes, that are for testing where ``x_test`` is
            not given; drawn once and for all.

    Raises ValueError, which names the file, where an array is missing, or they do not fit together.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} gives a {type(content).__name__}: make it a dict of arrays x and y.")
    found = {key: plain(f"{name}: {key}", value, floats=key.startswith("x")) for key, value in content.items()}
    if not {"x", "y"} <= found.keys() <= set(KEYS) or len({"x_test", "y_test"} & found.keys()) == 1:
        raise ValueError(f"{name} has {', '.join(map(str, found))}: give x and y, and perhaps {', '.join(KEYS[2:])}.")
    try:
        parts = ["", "_test"] if "x_test" in found else [""]
        y, num_classes, names = _labels([found[f"y{part}"] for part in parts])
        groups = np.unique(found["groups"], return_inverse=True)[1].astype(np.int64) if "groups" in found else None
        train, *rest = (Split(_samples(found[f"x{part}"]), y[i], None if i else groups) for i, part in enumerate(parts))
        if not rest:
            chosen = held_out(train.y, test, generator(0, "test"))
            tell_absent(groups, chosen, name, "test")
            train, rest = train.subset(~chosen), [train.subset(chosen)]
        return FederatedDataset(Path(name).stem, num_classes, train, rest[0], names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}.") from error


def plain(what: str, value: Any, *, floats: bool) -> np.ndarray:
    """An array of numbers, booleans or text: of a column of pandas' too, which keeps texts as objects; ``floats``:
    whether its numbers are such, whole or not.

    Raises ValueError, which says ``what`` it is, where it is neither throughout.
    """
    array = np.asarray(value)
    if array.dtype != object:
        return array
    whole = () if floats else ((bool, np.bool_), (Integral, np.int64))
    for kind, dtype in ((str, np.str_), *whole, (Real, np.float64)):
        if all(isinstance(entry, kind) for entry in array.flat):
            return array.astype(dtype)
    raise ValueError(f"{what} holds objects that are neither all texts nor all numbers: an empty one is neither.")


def require_columns(columns: Collection[Any], named: Mapping[str, Iterable[str | None]]) -> None:
    """Raises ValueError for a column that a key names and that is not there."""
    for key, name in ((key, name) for key, names in named.items() for name in names):
        if name not in columns:
            shown = "null" if name is None else name
            raise ValueError(f"{key}={shown} is no column; there are {', '.join(map(str, columns))}.")


def _labels(parts: list[np.ndarray]) -> tuple[list[np.ndarray], int, tuple[str, ...] | None]:
    """Labels as a :class:`Split` has them, the number of classes, and their names."""
    kinds = {part.dtype.kind for part in parts}
    if kinds <= set("iuUSb") and all(part.ndim == 1 for part in parts):
        values, index = np.unique(np.concatenate(parts), return_inverse=True)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return np.split(index.astype(np.int64), ends), len(values), tuple(map(str, values))
    if kinds <= set("iu"):  # of tokens
        tokens = [np.where(part < 0, IGNORE, part).astype(np.int64) for part in parts]
        return tokens, 1 + max(int(part.max(initial=0)) for part in tokens), None
    if kinds == {"f"}:
        targets = [_floats(part.reshape(len(part), -1)) for part in parts]
        return targets, targets[0].shape[1], None
    raise ValueError(f"y holds {parts[0].dtype} {[*parts[0].shape]}, neither classes nor floats to regress on")


def _samples(x: np.ndarray) -> np.ndarray:
    """Samples as a :class:`Split` has them."""
    if x.dtype.kind == "f" and x.ndim == 2:
        return _floats(x)
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    last = x.ndim == 4 and (x.shape[3] in (1, 3) or x.shape[3] < min(x.shape[1:3]))  # where the channels are
    if x.dtype == np.uint8 and last and x.shape[1] not in (1, 3):
        log.info("x %s is read as [n, H, W, C]", [*x.shape])
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x  # right, or refused


def _floats(values: np.ndarray) -> np.ndarray:
    """Numbers as precise as they are, until they are standardized: a float32 has 7 digits, and a time stamp 13."""
    return values.astype(np.float32 if values.itemsize < 8 else np.float64)
