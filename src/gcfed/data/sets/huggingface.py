"""Data sets of the Hugging Face hub, or what ``datasets`` wrote to a folder: images or texts, by any client column."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import Allocate, Raw, cached
from gcfed.data.sets.files import decode
from gcfed.data.sets.own import TESTS, Side, from_arrays, require_columns, written
from gcfed.data.sets.text import ALPHABET, LENGTH, encode, sequences
from gcfed.utils.checked import Inside, SettingError, checked
from gcfed.utils.resolvers import how_to_install

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image


@checked
def huggingface(
    name: str | None,
    data_dir: str,
    *,
    subset: str | None = None,
    input: str | None = None,
    label: str | None = None,
    groups: str | None = None,
    size: Side | None = None,
    length: Side = LENGTH,
    test: Inside = 0.2,
) -> FederatedDataset:
    """The split ``train``, and ``test`` or ``validation`` if it has labels: images [n, C, H, W], or texts [n, length]
    of LEAF's characters, cut or padded where each has a label, else in pieces with the next character as each one's.

    Decoded once, into the cache in ``data_dir``.

    Args:
        name: ``ylecun/mnist``, or a folder that ``save_to_disk`` wrote.
        subset: of a data set with several (its "configuration").
        input, label: columns; None: the only one of images, else of texts; the only one of classes, else none.
        groups: the column that says whose sample it is, for ``partition=natural``; None: no natural clients.
        size: side of the square to which images are resized; None: as they are, which must be of one size.
        length: characters of a text.
        test: share to test on, where there is no split for it.

    Raises ValueError where ``datasets`` is not installed, there is no such data set or column, or samples do not fit.
    """
    if name is None:
        raise SettingError("name", "=null must be a data set of the hub, ylecun/mnist, or a folder of save_to_disk.")
    files = [path for path in sorted(Path(name).rglob("*")) if path.is_file()]

    def build(_: Allocate) -> Raw:
        train, tests = _load(name, subset, data_dir)
        columns = _columns(train, input, label, groups)
        content = _arrays(train, *columns, size, length)
        labelled = [rows for rows in tests if columns[1] is None or -1 not in rows.unique(columns[1])]
        for rows in labelled[:1]:
            grey = content["x"].shape[1] == 1 if content["x"].ndim == 4 else None
            more = _arrays(rows, columns[0], columns[1], None, size, length, grey)
            content |= {f"{key}_test": array for key, array in more.items()}
        dataset = from_arrays(content, f"data.name={name}", test)
        parts = {part: (s.x, s.y, s.groups) for part, s in (("train", dataset.train), ("test", dataset.test))}
        if columns[1] is None:
            return parts, len(ALPHABET), ALPHABET
        names = getattr(train.features[columns[1]], "names", ())
        return parts, dataset.num_classes, names if len(names) == dataset.num_classes else dataset.class_names or ()

    where = Path(name).resolve() if files else name
    key = hashlib.sha256(repr((where, subset, input, label, groups, size, length, test)).encode()).hexdigest()[:12]
    source = written(files) if files else ""
    return replace(cached(data_dir, f"huggingface_{key}", build, source), name=Path(name).name)


def _load(name: str, subset: str | None, data_dir: str) -> tuple[Dataset, list[Dataset]]:
    """The training split, and those to test on, if they have labels."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"data=huggingface needs datasets: {how_to_install('huggingface')}") from None
    try:
        if Path(name).is_dir():
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, subset, cache_dir=str(Path(data_dir) / "huggingface"))
    except Exception as error:  # of the hub, the network or the files
        reason = " ".join(str(error).split())
        raise ValueError(f"data.name={name} cannot be loaded ({type(error).__name__}: {reason}).") from error
    if isinstance(found, datasets.Dataset):
        return found, []
    if "train" not in found:
        raise ValueError(f"data.name={name} has the splits {', '.join(found)}, and needs one called train.")
    return found["train"], [found[split] for split in TESTS if split in found]


def _columns(
    rows: Dataset, input: str | None, label: str | None, groups: str | None
) -> tuple[str, str | None, str | None]:
    """The columns of samples, labels and clients, as named or found."""
    named = {"data.input": input, "data.label": label, "partition.by": groups}
    require_columns(rows.features, {key: [name] for key, name in named.items() if name is not None})
    kinds = {name: (type(f).__name__, getattr(f, "dtype", "")) for name, f in rows.features.items() if name != groups}
    classes = [name for name, (kind, _) in kinds.items() if kind == "ClassLabel"]
    label = label or (classes[0] if len(classes) == 1 else "label" if "label" in kinds else None)
    images = [name for name, (kind, _) in kinds.items() if kind == "Image"]
    texts = [name for name, (_, dtype) in kinds.items() if "string" in dtype and name != label]
    if input is None and len(images or texts) != 1:
        raise ValueError(f"data.input=null: name the column of the images or texts, one of {', '.join(rows.features)}.")
    return input or (images or texts)[0], label, groups


def _arrays(
    rows: Dataset, input: str, label: str | None, groups: str | None, size: int | None, length: int,
    grey: bool | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The columns as :func:`from_arrays` takes them; ``grey``: images have one channel, None as the first one has."""
    content = {key: np.array(rows[name]) for key, name in (("y", label), ("groups", groups)) if name}
    if type(rows.features[input]).__name__ == "Image":
        if label is None:
            raise ValueError(f"data.label=null: name the column of the classes, one of {', '.join(rows.features)}.")
        return {"x": decode(_images(rows, input, grey), len(rows), f"images of {input}", size=size), **content}
    texts = list(rows[input])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"data.input={input} has a row that is no text: take it out.")
    if label is None:
        pieces = [sequences(encode(text), length) for text in texts]
        x, content["y"] = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        if groups:
            content["groups"] = np.repeat(content["groups"], [len(piece) for piece, _ in pieces])
        return {"x": x, **content}
    filled = "".join(text[:length].ljust(length, "\0") for text in texts)  # what no alphabet has is padding
    return {"x": encode(filled).reshape(-1, length), **content}


def _images(rows: Dataset, input: str, grey: bool | None) -> Iterator[tuple[str, Image]]:
    images = rows.select_columns([input])
    for i in range(len(rows)):
        try:
            image = images[i][input]
            grey = image.mode in ("1", "L") if grey is None else grey
            if grey and image.mode not in ("1", "L"):
                raise ValueError("it has colours, or is transparent, and the first one is grey: convert one of them")
            if image.mode[0] in "IF":
                raise ValueError(f"Pillow's mode {image.mode} has more than 8 bits a channel: convert it to 8")
            yield f"the image of row {i}", image.convert("L" if grey else "RGB")
        except Exception as error:  # whatever Pillow raises over a broken image
            raise ValueError(f"data.input={input} of row {i} is no readable image ({error}): take it out.") from error
