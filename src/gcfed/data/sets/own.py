"""The user's own data: arrays in an ``.npz``, or what the user's function returns."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from gcfed.data.base import FederatedDataset, Split, label_fix
from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.dealing import held_out
from gcfed.data.sets.files import Note, listing
from gcfed.data.sets.names import announce, number_names
from gcfed.tasks import IGNORE
from gcfed.utils.checked import Inside, checked
from gcfed.utils.near import near
from gcfed.utils.refusal import MissingFile, Refusal

log = logging.getLogger(__name__)
KEYS = ("x", "y", "x_test", "y_test", "groups")


@checked
def own_data(
    *,
    dataset: Callable[[], FederatedDataset | Mapping[str, Any]],
    test: Inside = 0.2,
    **settings: Any,
) -> FederatedDataModule:
    """The data module of the user's own data.

    Args:
        dataset: returns a :class:`FederatedDataset`, or arrays as for :func:`from_arrays`.
        test: share of the samples that become the test split if the data have none; the same for
            all seeds.
        settings: those of :class:`FederatedDataModule`. Settings that the config passes on to
            ``dataset`` are ignored.
    """
    passed_on = getattr(dataset, "keywords", {}).keys()
    for key in passed_on - signature(FederatedDataModule).parameters:
        settings.pop(key, None)

    def load() -> FederatedDataset:
        loaded = dataset()
        if isinstance(loaded, FederatedDataset):
            return loaded
        name = getattr(dataset, "func", dataset).__module__
        return from_arrays(loaded, name, test)

    return FederatedDataModule(dataset=load, **settings)


def unnamed(**_: Any) -> None:
    """Stands for the user's function in ``configs/data/own.yaml``."""
    raise Refusal(
        "data=own: name the function that loads your data, as in data.dataset._target_=mydata.load."
    )


@checked
def arrays(path: str | None, test: Inside = 0.2) -> FederatedDataset:
    """The arrays of an ``.npz``, as for :func:`from_arrays`.

    Raises MissingFile if there is no such file; Refusal if it is no ``.npz`` of plain arrays that
    match.
    """
    if path is None or not Path(path).is_file():
        raise MissingFile(
            f"data.path={path or 'null'} is no file: numpy.savez('x.npz', x=…, y=…) writes one."
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            content = dict(file)
    except Exception as error:  # of NumPy, of zip files or of their compression
        raise Refusal(
            f"data.path={path} is no .npz of plain arrays ({error}): write it by numpy.savez."
        ) from error
    return from_arrays(content, str(path), test)


def from_arrays(
    content: Any,
    name: str,
    test: float,
    note: Note = log.log,
    *,
    class_names: Sequence[str] = (),
) -> FederatedDataset:
    """The data set of these arrays. The log names its classes and clients.

    Args:
        content: by name, arrays or what NumPy converts to arrays, such as pandas' columns. ``x``:
            images uint8 [n, C, H, W], [n, H, W, C] with 1 or 3 channels, or [n, H, W]; tokens uint8
            [n, T]; or vectors, floats [n, d]. ``y``: the class of each sample, integers or text
            [n]; the class of each token, integers [n, T], negative for none; or targets of a
            regression, floats [n] or [n, C]. ``x_test`` and ``y_test``: the test split, if there is
            one. ``groups``: the natural client of each training sample, integers or text [n].
        name: of the file or module, for errors.
        test: share of the samples (of each class) that become the test split if ``x_test`` is
            missing.
        note: logs a text.
        class_names: names of the classes 0, 1, … in ``y``; empty: the values in ``y`` are names.

    Raises Refusal, with the file's name, if an array is missing or arrays do not match.
    """
    _require_keys(content, name)
    try:
        plain = {key: _plain(key, value) for key, value in content.items()}
        labels = [plain[key] for key in ("y", "y_test") if key in plain]
        y, num_classes, classes = _labels(labels)
        if class_names and classes:
            classes = tuple(class_names[int(number)] for number in classes)
        groups, clients = _groups(plain.get("groups"))
        train = Split(_samples(plain["x"]), y[0], groups)
        if "x_test" in plain:
            tests = Split(_samples(plain["x_test"]), y[1])
        else:
            chosen = held_out(train.y, test, "test")
            tests = train.subset(chosen)
            train = train.subset(~chosen)
        dataset = FederatedDataset(Path(name).stem, num_classes, train, tests, classes)
    except ValueError as error:
        raise Refusal(f"{name}: {error}.") from error
    if classes:
        announce(name, "classes", classes, note)
    if clients:
        announce(name, "clients", clients, note)
    _note_untested(dataset, name, note)
    return dataset


def _note_untested(dataset: FederatedDataset, name: str, note: Note) -> None:
    """Warns of classes that have training samples and no test sample."""
    untested = np.setdiff1d(dataset.train.classes, dataset.test.classes)
    if dataset.class_names is None or not len(untested):
        return
    names = [dataset.class_names[number] for number in untested]
    note(
        logging.WARNING,
        f"{name}: the test split has no sample of {len(names)} classes: {listing(names)}",
    )


def _require_keys(content: Any, name: str) -> None:
    """Raises Refusal unless ``content`` maps the names of the arrays to arrays."""
    if not isinstance(content, Mapping):
        fix = ""
        if hasattr(content, "__getitem__") and hasattr(content, "__len__"):
            fix = ': {"x": numpy.stack([x for x, _ in data]), "y": [y for _, y in data]}'
        if isinstance(content, tuple) and len(content) == 2:
            fix = ': {"x": x, "y": y}'
        kind = type(content).__name__
        raise Refusal(f"{name} gives a {kind}: make it a dict of arrays x and y{fix}.")
    is_complete = {"x", "y"} <= content.keys() <= set(KEYS)
    if not is_complete or ("x_test" in content) != ("y_test" in content):
        raise Refusal(
            f"{name} has {', '.join(map(str, content))}: give x and y, and perhaps"
            f" {', '.join(KEYS[2:])}."
        )


def require_columns(columns: Collection[Any], named: Mapping[str, Iterable[str | None]]) -> None:
    """Raises Refusal if a key names a column that is missing, or None."""
    known = [*map(str, columns)]
    for key, names in named.items():
        for name in {*names} - {*columns}:
            if name is None:
                raise Refusal(f"{key} is not set: name a column{near('', known)}")
            raise Refusal(f"{key}={name} is no column{near(str(name), known)}")


def _plain(key: str, value: Any) -> ndarray:
    """An array of numbers, booleans or text. Columns of pandas keep text as objects."""
    array = np.asarray(value)
    if array.dtype == object and key.startswith("x"):
        return _of_numbers(key, array)
    if array.dtype == object:
        return _of_one_type(key, array)
    if array.dtype.kind == "T":  # NumPy's texts of any length
        return np.array(array.tolist(), np.str_)
    if array.dtype.kind == "S":
        return np.char.decode(array)
    return array


def _of_numbers(key: str, array: ndarray) -> ndarray:
    """Objects as floats. Raises Refusal if one is no number."""
    try:
        return array.astype(np.float64)
    except TypeError as error:
        raise Refusal(f"{key} holds objects that are no numbers ({error})") from error


def _of_one_type(key: str, array: ndarray) -> ndarray:
    """Objects as an array of text or numbers. Integers of over 64 bits stay exact, as text.

    Raises Refusal for objects of several types, or of one that NumPy does not know.
    """
    types = {type(entry) for entry in array.flat}
    plain = np.array(array.tolist()) if len(types) == 1 else array
    if types == {int} and plain.dtype.kind not in "iu":
        return array.astype(np.str_)
    if plain.dtype == object:
        raise Refusal(
            f"{key} holds objects that are neither all text nor all numbers, such as empty cells"
        )
    return np.char.decode(plain) if plain.dtype.kind == "S" else plain


def _labels(parts: list[ndarray]) -> tuple[list[ndarray], int, tuple[str, ...] | None]:
    """The labels of each split as :class:`Split` takes them, the number of classes, and their
    names.
    """
    parts = [part if part.dtype.kind == "f" else _flat(part) for part in parts]
    kinds = {part.dtype.kind for part in parts}
    if kinds <= set("iuUb") and all(part.ndim == 1 for part in parts):
        class_of_n, names = number_names(_joined(parts), "an entry of y")
        y = np.split(class_of_n, [len(parts[0])])
        return y[: len(parts)], len(names), names
    if kinds <= set("iu"):  # of tokens
        tokens = [np.where(part < 0, IGNORE, part).astype(np.int64) for part in parts]
        return tokens, 1 + max(int(part.max(initial=0)) for part in tokens), None
    if kinds == {"f"}:
        targets = [_floats(part.reshape(len(part), -1)) for part in parts]
        return targets, targets[0].shape[1], None
    kinds_found = " and in y_test ".join(f"{part.dtype} {[*part.shape]}" for part in parts)
    fixes = [fix for fix in map(label_fix, parts) if fix]
    fix = fixes[0] if fixes else ""
    raise Refusal(
        f"y holds {kinds_found}, neither classes throughout nor floats to regress on{fix}"
    )


def _joined(parts: list[ndarray]) -> ndarray:
    """The classes of all splits. Those of unsigned and signed integers have no common type but
    float64, which would merge large ones.
    """
    if np.result_type(*parts).kind == "f":
        parts = [part.astype(object) for part in parts]
    return np.concatenate(parts)


def _groups(groups: ndarray | None) -> tuple[ndarray | None, tuple[str, ...]]:
    """The number of each sample's client, int64 [n], and the clients' names.

    Raises Refusal for NaN.
    """
    if groups is None:
        return None, ()
    groups = _flat(groups)
    missing = np.count_nonzero(groups != groups)  # NaN, and NaT of dates
    if missing:
        raise Refusal(
            f"groups holds {missing} empty entries (NaN): give each sample a client, or drop it"
        )
    return number_names(groups, "an entry of groups")


def _flat(values: ndarray) -> ndarray:
    """A column, [n, 1], as a vector, [n]."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _samples(x: ndarray) -> ndarray:
    """Samples as :class:`Split` takes them, or unchanged if it will refuse them."""
    if x.dtype.kind == "f" and x.ndim == 2:
        return _floats(x)
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] not in (1, 3):
        _, height, width, last = x.shape
        # also of four and more channels
        if last in (1, 3) or last < min(height, width) or height == width != last:
            log.info("x %s is read as [n, H, W, C]", [*x.shape])
            return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


def _floats(values: ndarray) -> ndarray:
    """float32 or float64.

    Float64 stays until data are standardized: a time stamp has 13 digits, float32 has 7.
    """
    return values.astype(np.float32 if values.itemsize < 8 else np.float64)
