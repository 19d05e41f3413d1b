"""Images or texts from the Hugging Face hub, or from a folder that ``datasets`` wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.files import TESTS, Keep, cached, written
from gcfed.data.sets.images import Side, decode
from gcfed.data.sets.leaf import LENGTH, encode
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.utils.checked import Inside, SettingError, checked

if TYPE_CHECKING:
    from datasets import Dataset


@checked
def huggingface(
    name: str | None, data_dir: str, *, subset: str | None = None, input: str | None = None, label: str | None = None,
    groups: str | None = None, size: Side | None = None, length: Side = LENGTH, test: Inside = 0.2,
) -> FederatedDataset:  # fmt: skip
    """The splits ``train`` and ``test`` (or ``validation``, if ``test`` has no labels). Images are [n, C, H, W].

    Texts are tokens of LEAF's characters, [n, length]: they are cut or padded.

    Args:
        name: ``ylecun/mnist``, or a folder that ``save_to_disk`` wrote.
        subset: the configuration, for a data set that has several.
        input: the column of samples; None: the only column of images, or else the only one of texts.
        label: the column of classes; None: the only one of type ``ClassLabel``, or else ``label``.
        groups: the column with the client of each sample, for ``partition=natural``; None: no natural clients.
        size: side of the square to which images are resized; None: all images must have one size.
        length: characters of a text.
        test: share of the samples that become the test split if there is none.

    Raises ValueError if ``datasets`` is not installed, there is no such data set or column, or samples do not match.
    """
    if name is None:
        raise SettingError("name", "=null must be a data set of the hub (ylecun/mnist), or a folder of save_to_disk.")
    files = [path for path in sorted(Path(name).rglob("*")) if path.is_file()]

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        train, tests = _load(name, subset, data_dir)
        columns = _columns(train, {"x": input, "y": label, "groups": groups})
        content, kind = _arrays(train, columns, size, length), columns["y"]
        for rows in [rows for rows in tests if -1 not in rows.unique(kind)][:1]:
            grey = content["x"].shape[1] == 1 if content["x"].ndim == 4 else None
            more = _arrays(rows, columns | {"groups": None}, size, length, grey)
            content |= {f"{key}_test": array for key, array in more.items()}
        dataset = from_arrays(content, f"data.name={name}", test)
        keep("train", **vars(dataset.train))
        keep("test", **vars(dataset.test))
        names = getattr(train.features[kind], "names", ())
        return dataset.num_classes, names if len(names) == dataset.num_classes else dataset.class_names or ()

    where = Path(name).resolve() if files else name
    settings = (where, subset, input, label, groups, size, length, test, "padded before")
    key = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    return replace(cached(data_dir, f"huggingface_{key}", build, written(files) if files else ""), name=Path(name).name)


def _load(name: str, subset: str | None, data_dir: str) -> tuple[Dataset, list[Dataset]]:
    """The training split, and the splits for testing."""
    try:
        import datasets
    except ImportError:
        raise ValueError("data=huggingface needs datasets: uv pip install -e '.[huggingface]'") from None
    if Path(name).is_dir():
        found = datasets.load_from_disk(name)
    else:
        found = datasets.load_dataset(name, subset, cache_dir=f"{data_dir}/huggingface")
    if isinstance(found, datasets.Dataset):
        return found, []
    if "train" not in found:
        raise ValueError(f"data.name={name} has the splits {', '.join(found)}, and needs one called train.")
    return found["train"], [found[split] for split in TESTS if split in found]


def _columns(rows: Dataset, named: dict[str, str | None]) -> dict[str, Any]:
    """The columns of samples (x), labels (y) and clients (groups), as named or else found by their types."""
    keys = zip(("data.input", "data.label", "partition.by"), named.values(), strict=True)
    require_columns(rows.features, {key: [name] for key, name in keys if name is not None})
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items() if name != named["groups"]}
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    label = named["y"] or (classes[0] if len(classes) == 1 else "label" if "label" in kinds else None)
    images = [name for name, kind in kinds.items() if kind == "Image"]
    texts = [name for name in kinds if "string" in getattr(rows.features[name], "dtype", "") and name != label]
    if label is None:
        raise ValueError(f"data.label=null: name the column of the classes, one of {', '.join(classes or kinds)}.")
    if named["x"] is None and len(images or texts) != 1:
        raise ValueError(f"data.input=null: name the column of the images or texts, one of {', '.join(rows.features)}.")
    return named | {"x": named["x"] or (images or texts)[0], "y": label}


def _arrays(
    rows: Dataset, columns: dict[str, Any], size: int | None, length: int, grey: bool | None = None
) -> dict[str, np.ndarray]:
    """The columns as arrays for :func:`from_arrays`. ``grey``: images have one channel; None: as the first image."""
    content = {key: np.array(rows[name]) for key, name in columns.items() if key != "x" and name}
    input = columns["x"]
    if type(rows.features[input]).__name__ == "Image":
        images = rows.select_columns([input])
        blocks = decode(
            range(len(rows)), f"images of {input}", opened=lambda i: images[i][input],
            named=lambda i: f"data.input={input} of row {i}", size=size, grey=grey,
        )  # fmt: skip
        return {"x": np.concatenate([*blocks]), **content}
    texts = list(rows[input])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"data.input={input} has a row that is no text: take it out.")
    # Padding is a character outside the alphabet. It comes first: networks read the label off the last position.
    padded = "".join(text[:length].rjust(length, "\0") for text in texts)
    return {"x": encode(padded).reshape(-1, length), **content}
