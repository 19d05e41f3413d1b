"""Images or texts from the Hugging Face hub, or from a folder that ``datasets`` wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray
from PIL import Image

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import SplitWriter, cache_name, cached
from gcfed.data.sets.files import TESTS, Note, entries, hash_files, listing, note_unread, why_unread
from gcfed.data.sets.images import Side
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.data.sets.pixels import Picture, decode, open_image
from gcfed.data.sets.text import LENGTH, Encoder, encoder_of, sequences_of
from gcfed.utils.checked import Inside, SettingError, checked
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import Refusal, message_of

if TYPE_CHECKING:
    from datasets import Dataset

METADATA = ("dataset_dict.json", "dataset_info.json", "state.json")


def huggingface(name: str | None, data_dir: str, **settings: Any) -> FederatedDataset:
    """The splits ``train`` and ``test`` (or ``validation``, if ``test`` has no labels) of a
    :class:`Request`.

    Images are [n, C, H, W].

    Texts are tokens, [n, length]. They are cut, or padded on the left, because networks read the
    label off the last position. With ``next_token`` each text becomes sequences of this length,
    padded on the right.

    Raises Refusal if ``datasets`` is not installed, there is no such data set or column, or
    samples do not match.
    """
    if name is None:
        raise SettingError(
            "name",
            "=null must be a data set of the hub (ylecun/mnist), or a folder of save_to_disk.",
        )
    request = Request(name, data_dir, **settings)
    files = request.files()
    source = hash_files(files) if files else ""
    dataset = cached(data_dir, request.cache_name(), partial(_build, request), source)
    return replace(dataset, name=Path(name).name)


@checked
@dataclass(frozen=True)
class Request:
    """Which data set is read, and how.

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
        download: False: only what is already there.
    """

    name: str
    data_dir: str
    _: KW_ONLY
    subset: str | None = None
    input: str | None = None
    label: str | None = None
    groups: str | None = None
    size: Side | None = None
    length: Side = LENGTH
    test: Inside = 0.2
    tokenizer: str | None = None
    next_token: bool = False
    download: bool = True

    @property
    def key(self) -> str:
        """The setting that errors name."""
        return f"data.name={self.name}"

    @property
    def folder(self) -> Path:
        """The folder that contains all files of the data set."""
        place = Path(self.name)
        return (place if place.is_dir() else Path(self.data_dir) / "huggingface").resolve()

    def files(self) -> list[Path]:
        """The files of a folder that the name or the tokenizer is."""
        files = []
        for place in (self.name, self.tokenizer):
            if place:
                files += [path for path in sorted(Path(place).rglob("*")) if path.is_file()]
        return files

    def cache_name(self) -> str:
        place = Path(self.name).resolve() if Path(self.name).is_dir() else self.name
        settings = vars(self) | {"name": str(place), "data_dir": None}
        del settings["download"]  # it does not change what is read
        return cache_name("huggingface", settings)


def _build(request: Request, keep: SplitWriter) -> tuple[int, Sequence[str]]:
    """Reads the splits and keeps them."""
    splits = _load(request)
    for rows in splits.values():
        for file in rows.cache_files:
            _refuse_outside(request.folder, file["filename"], request.key)
    train = splits["train"]
    if not len(train):
        raise Refusal(f"{request.key}: the split train has no row.")
    columns = _columns(train, request)
    encoder = encoder_of(request.tokenizer, request.download)
    reader = _Reader(request, columns, encoder, keep.note)
    content = reader.arrays(train, "train")
    used = ["train", *reader.add_test(splits, content)]
    _note_left(request, splits, used, columns, keep)
    names = _names(train, columns.label)
    dataset = from_arrays(content, request.key, request.test, keep.note, class_names=names)
    keep("train", **vars(dataset.train))
    keep("test", **vars(dataset.test))
    if columns.label is None:
        return encoder.num_tokens, ()
    return dataset.num_classes, dataset.class_names or ()


def _load(request: Request) -> dict[str, Dataset]:
    """The splits, by name. One is called ``train``."""
    installed("datasets", "data=huggingface", "huggingface")
    import datasets

    name = request.name
    if Path(name).is_dir():
        try:
            loaded = datasets.load_from_disk(name)
        except Exception as error:  # of any type, for a folder with any content
            text = message_of(error)
            raise Refusal(
                f"data.name={name} is no folder of save_to_disk, or has a split without rows"
                f" ({text}): write it again, or take data=csv or image_folder."
            ) from error
    elif request.download:
        cache = f"{request.data_dir}/huggingface"
        loaded = datasets.load_dataset(name, request.subset, cache_dir=cache)
    else:
        raise Refusal(f"data.name={name} is not downloaded yet, and data.dataset.download=false.")
    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    if "train" not in loaded:
        raise Refusal(
            f"data.name={name} has the splits {', '.join(loaded)}, and needs one called train."
        )
    return dict(loaded)


def _is_labelled(rows: Dataset | None, label: str | None) -> bool:
    """Whether there is such a split, with labels in this column if it is not None."""
    if rows is None or not len(rows):
        return False
    return label is None or rows.unique(label) != [-1]


def _names(rows: Dataset, label: str | None) -> Sequence[str]:
    """The names of classes 0, 1, …, if the column of labels has some."""
    if label is None:
        return []
    return getattr(rows.features[label], "names", [])


def _note_left(
    request: Request,
    splits: Mapping[str, Dataset],
    used: Sequence[str],
    columns: _Columns,
    keep: SplitWriter,
) -> None:
    """Notes the splits, the columns and the files that are not read."""
    for split, rows in splits.items():
        if split not in used:
            chosen = " and ".join(used)
            keep.note(
                logging.WARNING,
                f"{request.key}: split {split} with {len(rows)} rows is not read: {chosen} is used",
            )
    read = vars(columns).values()
    others = [column for column in splits["train"].features if column not in read]
    if others:
        keep.note(logging.INFO, f"{request.key}: columns that are not read: {listing(others)}")
    folder = Path(request.name).resolve()
    if not folder.is_dir():
        return
    arrow = {Path(file["filename"]) for split in used for file in splits[split].cache_files}
    why_left = {}
    for path in entries(folder):
        if path in arrow or path.name in METADATA:
            continue
        split = path.relative_to(folder).parts[0]
        reason = f"of the split {split}" if split in splits else "not part of the data set"
        why_left[path] = why_unread(path, folder) or reason
    note_unread(folder, why_left, keep.note)


def _refuse_outside(folder: Path, path: str, what: str) -> None:
    """Raises Refusal for a path outside the data set's folder, or an address.

    A stranger's data set could name any file of this machine.
    """
    if "://" in path or not Path(path).resolve().is_relative_to(folder):
        raise Refusal(
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


@dataclass(frozen=True)
class _Columns:
    """The columns of samples, labels and clients."""

    input: str
    label: str | None  # None if the next token is the label
    groups: str | None


def _columns(rows: Dataset, request: Request) -> _Columns:
    """The columns as the request names them. It may leave those out that their types show."""
    named = {
        "data.input": request.input,
        "data.label": request.label,
        "partition.by": request.groups,
    }
    require_columns(rows.features, {key: [name] for key, name in named.items() if name is not None})
    others = [name for name in rows.features if name != request.groups]
    label = None
    images: list[str] = []
    if not request.next_token:
        classes = [name for name in others if _kind(rows, name) == "ClassLabel"]
        if len(classes) != 1 and "label" in others:
            classes = ["label"]
        label = request.label or _only("data.label", "the classes", classes, others)
        images = [name for name in others if _kind(rows, name) == "Image"]
    texts = []
    for name in others:
        if name != label and "string" in getattr(rows.features[name], "dtype", ""):
            texts.append(name)
    input = request.input or _only("data.input", "the images or texts", images or texts, others)
    return _Columns(input, label, request.groups)


def _only(key: str, what: str, candidates: Sequence[str], names: Iterable[str]) -> str:
    """The only candidate. Raises Refusal, with the names of columns, for another number of them."""
    if len(candidates) != 1:
        raise Refusal(
            f"{key}=null: name the column of {what}, one of {', '.join(candidates or names)}."
        )
    return candidates[0]


def _kind(rows: Dataset, column: str) -> str:
    return type(rows.features[column]).__name__


@dataclass(frozen=True)
class _Reader:
    """Makes arrays of the columns of a split, for :func:`from_arrays`."""

    request: Request
    columns: _Columns
    encoder: Encoder
    note: Note

    def arrays(
        self, rows: Dataset, split: str, grey: bool | None = None, with_groups: bool = True
    ) -> dict[str, ndarray]:
        """The arrays of a split by the names x, y and groups.

        ``grey``: images have one channel; None: as the first image.
        """
        columns = self.columns
        content = {}
        if columns.label is not None:
            content["y"] = np.array(rows[columns.label])
            self._require_classes(rows, content["y"])
        if columns.groups is not None and with_groups:
            content["groups"] = np.array(rows[columns.groups])
        if _kind(rows, columns.input) == "Image":
            return {"x": self._images(rows, split, grey), **content}
        texts = list(rows[columns.input])
        if not all(isinstance(text, str) for text in texts):
            raise Refusal(f"data.input={columns.input} has a row that is no text: take it out.")
        if columns.label is not None:
            return {"x": self._texts(texts, split), **content}
        return self._sequences(texts, split, content)

    def add_test(self, splits: Mapping[str, Dataset], content: dict[str, ndarray]) -> list[str]:
        """Adds the arrays x_test and y_test of the first split for testing that has labels.

        Returns the name of this split, or nothing.
        """
        label = self.columns.label
        labelled = [split for split in TESTS if _is_labelled(splits.get(split), label)]
        if not labelled:
            return []
        rows = splits[labelled[0]]
        if _names(rows, label) != _names(splits["train"], label):
            raise Refusal(
                f"data.label={label} has other classes in the test split: cast both to one"
                " ClassLabel."
            )
        grey = content["x"].shape[1] == 1 if content["x"].ndim == 4 else None
        for key, array in self.arrays(rows, labelled[0], grey, with_groups=False).items():
            content[f"{key}_test"] = array
        return labelled[:1]

    def _require_classes(self, rows: Dataset, y: ndarray) -> None:
        """Raises Refusal if samples have no class."""
        if not _names(rows, self.columns.label):
            return
        count = np.count_nonzero(y < 0)
        if count:
            raise Refusal(
                f"data.label={self.columns.label} is -1, no class, in {count} of {len(rows)}"
                " samples: filter them out."
            )

    def _images(self, rows: Dataset, split: str, grey: bool | None) -> ndarray:
        """uint8 [n, C, H, W]."""
        input = self.columns.input
        opened = _opener(rows, input, self.request.folder)
        pictures = []
        for row in range(len(rows)):
            pictures.append(Picture(f"data.input={input} of row {row}", partial(opened, row)))
        blocks = decode(
            pictures,
            f"images of {split}",
            size=self.request.size,
            grey=grey,
            note=self.note,
        )
        return np.concatenate([*blocks])

    def _texts(self, texts: list[str], split: str) -> ndarray:
        """One row of tokens for each text, padded on the left, [n, length]."""
        length = self.request.length
        x = np.full((len(texts), length), self.encoder.padding, np.int32)
        tokens = [self.encoder.encode(text, length) for text in texts]
        self._note_unknown(tokens, split)
        num_full = 0
        for row, of_text in zip(x, tokens, strict=True):
            row[length - len(of_text) :] = of_text
            num_full += len(of_text) == length
        if num_full:
            text = f"{split}: {num_full} of {len(texts)} texts fill data.length={length}"
            self.note(logging.INFO, f"{text} tokens, and are cut if they are longer")
        return x.astype(tokens[0].dtype)

    def _sequences(
        self, texts: list[str], split: str, content: dict[str, ndarray]
    ) -> dict[str, ndarray]:
        """The sequences of all texts, [n, length], and the next tokens as their labels."""
        tokens = [self.encoder.encode(text, None) for text in texts]
        self._note_unknown(tokens, split)
        x, y, sizes = sequences_of(tokens, self.request.length, self.encoder.padding)
        if 0 in sizes:
            text = f"{split}: {sizes.count(0)} of {len(texts)} texts are not read: they have fewer"
            self.note(logging.WARNING, f"{text} than two tokens")
        arrays = {"x": x, "y": y}
        for key, values in content.items():
            arrays[key] = np.repeat(values, sizes, axis=0)
        return arrays

    def _note_unknown(self, tokens: list[ndarray], split: str) -> None:
        """Notes the characters that LEAF's alphabet lacks."""
        padding = self.encoder.padding
        unknown = sum(np.count_nonzero(of_text == padding) for of_text in tokens)
        if unknown:
            known = sum(map(len, tokens))
            text = f"{split}: {unknown} of {known} characters are not in LEAF's alphabet and become"
            self.note(logging.WARNING, f"{text} padding; data.tokenizer reads other texts")
