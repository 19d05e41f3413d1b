"""Images or texts from the Hugging Face hub, or from a folder that ``datasets`` wrote."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.files import (
    TESTS,
    Keep,
    Note,
    cached,
    entries,
    listing,
    report_unread,
    why_unread,
    written,
)
from gcfed.data.sets.images import Side, decode, open_image
from gcfed.data.sets.leaf import ALPHABET, LENGTH, PAD, encode, sequences
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.utils.checked import Inside, SettingError, checked
from gcfed.utils.instantiate import installed

if TYPE_CHECKING:
    from datasets import Dataset

METADATA = ("dataset_dict.json", "dataset_info.json", "state.json")


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
        splits = _load(name, subset, data_dir)
        folder = Path(name if Path(name).is_dir() else f"{data_dir}/huggingface").resolve()
        for rows in splits.values():
            for file in rows.cache_files:
                _refuse_outside(folder, file["filename"], f"data.name={name}")
        train = splits["train"]
        if not len(train):
            raise ValueError(f"data.name={name}: the split train has no row.")
        columns = _columns(train, {"x": input, "y": label, "groups": groups}, next_token)
        encoder = _encoder(tokenizer)
        reader = _Reader(columns, size, length, encoder, keep.note, folder)
        kind = columns["y"]
        content = reader.arrays(train, "train")
        used = ["train", *reader.add_test(splits, content)]
        _report_left(name, splits, used, columns, keep)
        dataset = from_arrays(
            content, f"data.name={name}", test, keep.note, class_names=_names(train, kind)
        )
        keep("train", **vars(dataset.train))
        keep("test", **vars(dataset.test))
        if kind is None:
            return encoder[1], ()
        return dataset.num_classes, dataset.class_names or ()

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
        "all classes known, with notes",
    )
    settings += (tokenizer, next_token) if tokenizer or next_token else ()
    key = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    return replace(
        cached(data_dir, f"huggingface_{key}", build, written(files) if files else ""),
        name=Path(name).name,
    )


def _load(name: str, subset: str | None, data_dir: str) -> dict[str, Dataset]:
    """The splits, by name. One is called ``train``."""
    installed("datasets", "data=huggingface", "huggingface")
    import datasets

    if Path(name).is_dir():
        try:
            found = datasets.load_from_disk(name)
        except Exception as error:  # of any type, for a folder with any content
            text = " ".join(str(error).split())
            raise ValueError(
                f"data.name={name} is no folder of save_to_disk, or has a split without rows"
                f" ({text}): write it again, or take data=csv or image_folder."
            ) from error
    else:
        found = datasets.load_dataset(name, subset, cache_dir=f"{data_dir}/huggingface")
    if isinstance(found, datasets.Dataset):
        return {"train": found}
    if "train" not in found:
        raise ValueError(
            f"data.name={name} has the splits {', '.join(found)}, and needs one called train."
        )
    return dict(found)


def _is_labelled(rows: Dataset | None, kind: str | None) -> bool:
    """Whether there is such a split, with labels if these are the column ``kind``."""
    if rows is None or not len(rows):
        return False
    return kind is None or rows.unique(kind) != [-1]


def _names(rows: Dataset, kind: str | None) -> Sequence[str]:
    """The names of classes 0, 1, …, if the column ``kind`` has some."""
    return [] if kind is None else getattr(rows.features[kind], "names", [])


def _report_left(
    name: str,
    splits: Mapping[str, Dataset],
    used: Sequence[str],
    columns: Mapping[str, str | None],
    keep: Keep,
) -> None:
    """Notes the splits, the columns and the files that are not read."""
    place = f"data.name={name}"
    for split, rows in splits.items():
        if split not in used:
            chosen = " and ".join(used)
            text = f"{place}: split {split} with {len(rows)} rows is not read: {chosen} is used"
            keep.note(logging.WARNING, text)
    others = [column for column in splits["train"].features if column not in columns.values()]
    if others:
        keep.note(logging.INFO, f"{place}: columns that are not read: {listing(others)}")
    folder = Path(name).resolve()
    if not folder.is_dir():
        return
    arrow = {Path(file["filename"]) for split in used for file in splits[split].cache_files}
    left: defaultdict[str, list[Path]] = defaultdict(list)
    for path in entries(folder):
        if path in arrow or path.name in METADATA:
            continue
        split = path.relative_to(folder).parts[0]
        reason = f"of the split {split}" if split in splits else "not part of the data set"
        left[why_unread(path, folder) or reason].append(path)
    report_unread(folder, left, keep.note)


def _refuse_outside(folder: Path, path: str, what: str) -> None:
    """Raises ValueError for a path outside the data set's folder, or an address.

    A stranger's data set could name any file of this machine.
    """
    if "://" in path or not Path(path).resolve().is_relative_to(folder):
        raise ValueError(
            f"{what} names {path}, which is not in {folder}: write the data set with save_to_disk"
            " where its files are, which puts them inside"
        )


def _opener(rows: Dataset, input: str, folder: Path) -> Callable[[int], Image.Image]:
    """Opens the image of a row, without ``datasets``, which would follow any address and let Pillow
    try formats that start a program.
    """
    import datasets

    mode = rows.features[input].mode
    encoded = rows.select_columns([input]).cast_column(input, datasets.Image(decode=False))

    def opened(row: int) -> Image.Image:
        entry = encoded[row][input]
        if entry["bytes"] is not None:
            image = open_image(BytesIO(entry["bytes"]))
        else:
            _refuse_outside(folder, str(entry["path"]), "it")
            image = open_image(entry["path"])
        return image.convert(mode) if mode else image

    return opened


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


@dataclass(frozen=True)
class _Reader:
    """Makes arrays of the columns of a split, for :func:`from_arrays`.

    columns: of samples (x), labels (y) and clients (groups).
    size: side of the square to which images are resized, or None.
    length: tokens of a text.
    folder: contains all files of the data set.
    """

    columns: Mapping[str, str | None]
    size: int | None
    length: int
    encoder: _Encoder
    note: Note
    folder: Path

    def arrays(
        self, rows: Dataset, split: str, grey: bool | None = None, with_groups: bool = True
    ) -> dict[str, np.ndarray]:
        """The arrays of a split by the names x, y and groups.

        ``grey``: images have one channel; None: as the first image.
        """
        content = {}
        for key in ("y", "groups") if with_groups else ("y",):
            column = self.columns[key]
            if column:
                content[key] = np.array(rows[column])
        self._require_classes(rows, content.get("y"))
        input = str(self.columns["x"])
        if type(rows.features[input]).__name__ == "Image":
            return {"x": self._images(rows, input, split, grey), **content}
        texts = list(rows[input])
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"data.input={input} has a row that is no text: take it out.")
        if self.columns["y"]:
            return {"x": self._texts(texts, split), **content}
        return self._sequences(texts, split, content)

    def add_test(self, splits: Mapping[str, Dataset], content: dict[str, np.ndarray]) -> list[str]:
        """Adds the arrays x_test and y_test of the first split for testing that has labels.

        Returns the name of this split, or nothing.
        """
        kind = self.columns["y"]
        labelled = [split for split in TESTS if _is_labelled(splits.get(split), kind)]
        if not labelled:
            return []
        rows = splits[labelled[0]]
        if _names(rows, kind) != _names(splits["train"], kind):
            raise ValueError(
                f"data.label={kind} has other classes in the test split: cast both to one"
                " ClassLabel."
            )
        grey = content["x"].shape[1] == 1 if content["x"].ndim == 4 else None
        for key, array in self.arrays(rows, labelled[0], grey, with_groups=False).items():
            content[f"{key}_test"] = array
        return labelled[:1]

    def _require_classes(self, rows: Dataset, y: np.ndarray | None) -> None:
        if y is None or not _names(rows, self.columns["y"]):
            return
        count = np.count_nonzero(y < 0)
        if count:
            raise ValueError(
                f"data.label={self.columns['y']} is -1, no class, in {count} of {len(rows)}"
                " samples: filter them out."
            )

    def _images(self, rows: Dataset, input: str, split: str, grey: bool | None) -> np.ndarray:
        """uint8 [n, C, H, W]."""
        blocks = decode(
            range(len(rows)),
            f"images of {split}",
            opened=_opener(rows, input, self.folder),
            named=lambda i: f"data.input={input} of row {i}",
            size=self.size,
            grey=grey,
            note=self.note,
        )
        return np.concatenate([*blocks])

    def _texts(self, texts: list[str], split: str) -> np.ndarray:
        """One row of tokens for each text, padded on the left, [n, length]."""
        encoded, _, pad = self.encoder
        tokens = [encoded(text, self.length) for text in texts]
        self._note_unknown(tokens, split)
        full = sum(len(t) == self.length for t in tokens)
        if full:
            text = f"{split}: {full} of {len(texts)} texts fill data.length={self.length} tokens"
            self.note(logging.INFO, f"{text}, and are cut if they are longer")
        padded = [np.pad(t, (self.length - len(t), 0), constant_values=pad) for t in tokens]
        return np.stack(padded)

    def _sequences(
        self, texts: list[str], split: str, content: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The sequences of all texts, [n, length], and the next tokens as their labels."""
        encoded, _, pad = self.encoder
        tokens = [encoded(text, None) for text in texts]
        self._note_unknown(tokens, split)
        pieces = [sequences(t, self.length, pad) for t in tokens]
        sizes = [len(x) for x, _ in pieces]
        if 0 in sizes:
            text = f"{split}: {sizes.count(0)} of {len(texts)} texts are not read: they have fewer"
            self.note(logging.WARNING, f"{text} than two tokens")
        x = np.concatenate([x for x, _ in pieces])
        y = np.concatenate([y for _, y in pieces])
        more = {key: np.repeat(values, sizes, axis=0) for key, values in content.items()}
        return {"x": x, "y": y, **more}

    def _note_unknown(self, tokens: list[np.ndarray], split: str) -> None:
        """Notes the characters that LEAF's alphabet lacks."""
        pad = self.encoder[2]
        unknown = sum(np.count_nonzero(t == pad) for t in tokens)
        if unknown:
            known = sum(map(len, tokens))
            text = f"{split}: {unknown} of {known} characters are not in LEAF's alphabet and become"
            self.note(logging.WARNING, f"{text} padding; data.tokenizer reads other texts")
