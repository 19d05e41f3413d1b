"""Images or texts from the Hugging Face hub, or from a folder that ``datasets`` wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.files import TESTS, Keep, cached, written
from gcfed.data.sets.images import Side, decode
from gcfed.data.sets.leaf import ALPHABET, LENGTH, PAD, encode, sequences
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.utils.checked import Inside, SettingError, checked
from gcfed.utils.instantiate import installed

if TYPE_CHECKING:
    from datasets import Dataset


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
    tokenizer: str | None = None,
    next_token: bool = False,
) -> FederatedDataset:
    """The splits ``train`` and ``test`` (or ``validation``, if ``test`` has no labels).

    Images are [n, C, H, W].

    Texts are tokens, [n, length]. They are cut, or padded on the left, because networks read the
    label off the last position. With ``next_token`` each text becomes sequences of this length,
    padded on the right.

    Args:
        name: ``ylecun/mnist``, or a folder that ``save_to_disk`` wrote.
        subset: the configuration, for a data set that has several.
        input: the column of samples; None: the only column of images, or else the only one of
            texts.
        label: the column of classes; None: the only one of type ``ClassLabel``, or else ``label``.
        groups: the column with the client of each sample, for ``partition=natural``; None: no
            natural clients.
        size: side of the square to which images are resized; None: all images must have one size.
        length: tokens of a text.
        test: share of the samples that become the test split if there is none.
        tokenizer: of the hub, or its folder. Padding is −1. None: a token is one of LEAF's
            characters, padding is 80.
        next_token: the label of each token is the next one (a language model); there is no column
            of classes.

    Raises ValueError if ``datasets`` is not installed, there is no such data set or column, or
    samples do not match.
    """
    if name is None:
        raise SettingError(
            "name",
            "=null must be a data set of the hub (ylecun/mnist), or a folder of save_to_disk.",
        )
    files = [
        path
        for place in (name, tokenizer)
        if place
        for path in sorted(Path(place).rglob("*"))
        if path.is_file()
    ]

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        train, tests = _load(name, subset, data_dir)
        columns, read = (
            _columns(train, {"x": input, "y": label, "groups": groups}, next_token),
            _encoder(tokenizer),
        )
        content, kind = _arrays(train, columns, size, length, read), columns["y"]
        for rows in [rows for rows in tests if not kind or rows.unique(kind) != [-1]][:1]:
            if kind and getattr(rows.features[kind], "names", ()) != getattr(
                train.features[kind], "names", ()
            ):
                raise ValueError(
                    f"data.label={kind} has other classes in the test split: cast both to one"
                    " ClassLabel."
                )
            grey = content["x"].shape[1] == 1 if content["x"].ndim == 4 else None
            more = _arrays(rows, columns | {"groups": None}, size, length, read, grey)
            content |= {f"{key}_test": array for key, array in more.items()}
        dataset = from_arrays(content, f"data.name={name}", test)
        keep("train", **vars(dataset.train))
        keep("test", **vars(dataset.test))
        if kind is None:
            return read[1], ()
        names = getattr(train.features[kind], "names", ())
        return dataset.num_classes, (
            names if len(names) == dataset.num_classes else dataset.class_names or ()
        )

    where = Path(name).resolve() if files else name
    settings: tuple[Any, ...] = (
        where,
        subset,
        input,
        label,
        groups,
        size,
        length,
        test,
        "all classes known",
    )
    settings += (tokenizer, next_token) if tokenizer or next_token else ()
    key = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    return replace(
        cached(data_dir, f"huggingface_{key}", build, written(files) if files else ""),
        name=Path(name).name,
    )


def _load(name: str, subset: str | None, data_dir: str) -> tuple[Dataset, list[Dataset]]:
    """The training split, and the splits for testing."""
    installed("datasets", "data=huggingface", "huggingface")
    import datasets

    if Path(name).is_dir():
        found = datasets.load_from_disk(name)
    else:
        found = datasets.load_dataset(name, subset, cache_dir=f"{data_dir}/huggingface")
    if isinstance(found, datasets.Dataset):
        return found, []
    if "train" not in found:
        raise ValueError(
            f"data.name={name} has the splits {', '.join(found)}, and needs one called train."
        )
    return found["train"], [found[split] for split in TESTS if split in found]


_Encoder = tuple[Callable[[str, int | None], np.ndarray], int, int]
"""Takes a text and its largest number of tokens, and returns its tokens; the
number of all tokens; padding.
"""


def _encoder(tokenizer: str | None) -> _Encoder:
    """LEAF's characters, or a tokenizer of transformers with its own special tokens.

    No code of its folder is run.
    """
    if tokenizer is None:
        return lambda text, length: encode(text[:length]), len(ALPHABET), PAD
    installed("transformers", "data.tokenizer", "huggingface")
    from transformers import AutoTokenizer  # takes seconds

    try:
        tokens = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        if len(tokens) < 2:  # transformers makes an empty one for a folder with a model only
            raise ValueError("there is no tokenizer")
    except Exception as error:  # of any type, for a folder with any content
        raise SettingError("tokenizer", f"={tokenizer}: {' '.join(str(error).split())}") from None

    def encoded(text: str, length: int | None) -> np.ndarray:
        cut = {} if length is None else {"truncation": True, "max_length": length}
        return np.array(tokens(text, verbose=False, **cut)["input_ids"], np.int32)

    return encoded, len(tokens), -1


def _columns(rows: Dataset, named: dict[str, str | None], next_token: bool) -> dict[str, Any]:
    """The columns of samples (x), labels (y) and clients (groups), as named or else found by their
    types.
    """
    keys = zip(("data.input", "data.label", "partition.by"), named.values(), strict=True)
    require_columns(rows.features, {key: [name] for key, name in keys if name is not None})
    kinds = {
        name: type(feature).__name__
        for name, feature in rows.features.items()
        if name != named["groups"]
    }
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    label = named["y"] or (
        classes[0] if len(classes) == 1 else "label" if "label" in kinds else None
    )
    images = [name for name, kind in kinds.items() if kind == "Image"]
    texts = [
        name
        for name in kinds
        if "string" in getattr(rows.features[name], "dtype", "") and name != label
    ]
    if next_token:
        label, images = None, []
    elif label is None:
        raise ValueError(
            "data.label=null: name the column of the classes, one of"
            f" {', '.join(classes or kinds)}."
        )
    if named["x"] is None and len(images or texts) != 1:
        raise ValueError(
            "data.input=null: name the column of the images or texts, one of"
            f" {', '.join(rows.features)}."
        )
    return named | {"x": named["x"] or (images or texts)[0], "y": label}


def _arrays(
    rows: Dataset,
    columns: dict[str, Any],
    size: int | None,
    length: int,
    read: _Encoder,
    grey: bool | None = None,
) -> dict[str, np.ndarray]:
    """The columns as arrays for :func:`from_arrays`.

    ``grey``: images have one channel; None: as the first image.
    """
    content = {key: np.array(rows[name]) for key, name in columns.items() if key != "x" and name}
    input, label = columns["x"], columns["y"]
    if (
        label
        and hasattr(rows.features[label], "names")
        and (count := np.count_nonzero(content["y"] < 0))
    ):
        raise ValueError(
            f"data.label={label} is -1, no class, in {count} of {len(rows)} samples: filter them"
            " out."
        )
    if type(rows.features[input]).__name__ == "Image":
        images = rows.select_columns([input])
        blocks = decode(
            range(len(rows)),
            f"images of {input}",
            opened=lambda i: images[i][input],
            named=lambda i: f"data.input={input} of row {i}",
            size=size,
            grey=grey,
        )
        return {"x": np.concatenate([*blocks]), **content}
    texts = list(rows[input])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"data.input={input} has a row that is no text: take it out.")
    encoded, _, pad = read
    if label:
        cut = (encoded(text, length) for text in texts)
        return {
            "x": np.stack([np.pad(t, (length - len(t), 0), constant_values=pad) for t in cut]),
            **content,
        }
    pieces = [sequences(encoded(text, None), length, pad) for text in texts]
    sizes = [len(x) for x, _ in pieces]
    x, y = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    return {
        "x": x,
        "y": y,
        **{key: np.repeat(values, sizes, axis=0) for key, values in content.items()},
    }
