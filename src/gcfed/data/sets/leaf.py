"""LEAF's FEMNIST, CelebA and Shakespeare, from the JSON files that its preprocessing writes.

"LEAF: A Benchmark for Federated Settings" (Caldas et al. 2019). The files are
``femnist/data/{train,test}/*.json`` (and so on) in the data folder, which may be LEAF's folder
``data``. Groups are LEAF's users, in the order of their names.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from PIL.Image import Resampling

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.cache import SplitWriter, cached
from gcfed.data.sets.files import count_files, entries, hash_files, listing, note_unread, why_unread
from gcfed.data.sets.names import announce, number_names
from gcfed.data.sets.pixels import decode, pictures_of
from gcfed.data.sets.text import ALPHABET, LENGTH, PAD, encode
from gcfed.utils.refusal import MissingFile, Refusal

# From LEAF's pages: the whole data set, with each user's samples split into training and test.
COMMANDS = {
    "femnist": "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample",
    "celeba": "./preprocess.sh -s niid --sf 1.0 -k 5 -t sample",
    "shakespeare": "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.8",
}
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

FACES = "raw/img_align_celeba"  # CelebA's images

Samples = tuple[ndarray, ndarray]
"""x [n, …] and y int64 [n] of one user."""


def femnist(data_dir: str) -> FederatedDataset:
    """Handwritten characters by writer, [n, 1, 28, 28], 62 classes.

    Ink is 0 and paper is 255, as in LEAF.
    """
    return _leaf("femnist", data_dir, _characters, CHARACTERS)


def celeba(data_dir: str) -> FederatedDataset:
    """Faces by celebrity, smiling or not, [n, 3, 84, 84].

    As in LEAF, resizing does not keep the aspect ratio.

    The images of https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html are in
    ``celeba/data/raw/img_align_celeba/``.
    """
    return _leaf("celeba", data_dir, _faces, ("not smiling", "smiling"))


def shakespeare(data_dir: str) -> FederatedDataset:
    """80 characters by role, [n, 80], and the next one as the label, [n].

    Labels outside ALPHABET are left out.
    """
    return _leaf("shakespeare", data_dir, _lines, ALPHABET)


def _characters(x: list[list[float]], y: list[int]) -> Samples:
    pixels = np.reshape(np.array(x, np.float64), (-1, 1, 28, 28))
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise Refusal("a pixel is outside 0 … 1")
    return np.rint(pixels * 255.0).astype(np.uint8), _whole(y)


def _faces(x: list[str], y: list[float]) -> Samples:
    return np.array([Path(name).name for name in x], np.str_), _whole(y)


def _lines(x: list[str], y: list[str]) -> Samples:
    if {*map(len, x)} != {LENGTH} or {*map(len, y)} != {1}:
        raise Refusal(f"a text has not {LENGTH} characters, or a label not one")
    tokens = encode("".join(x)).reshape(len(y), LENGTH)
    labels = encode("".join(y)).astype(np.int64)
    known = labels != PAD
    return tokens[known], labels[known]


def _whole(y: list[Any]) -> ndarray:
    """Class indices, int64 [n]."""
    labels = np.array(y, np.float64)
    if (labels % 1).any():
        raise Refusal("a label is no whole number")
    return labels.astype(np.int64)


def _leaf(
    name: str, data_dir: str, read: Callable[..., Samples], classes: Sequence[str]
) -> FederatedDataset:
    root = Path(data_dir) / name / "data"
    files = {part: _json_files(root / part) for part in ("train", "test")}

    def build(keep: SplitWriter) -> tuple[int, Sequence[str]]:
        if not all(files.values()):
            raise MissingFile(
                f"data set {name}: no JSON file in {root.resolve()}/train or test. Clone"
                f" github.com/TalwalkarLab/leaf, run {COMMANDS[name]} in its folder data/{name},"
                " and set paths.data_dir (DATA_DIR) to its folder data."
            )
        parts = {part: _users(paths, read, keep) for part, paths in files.items()}
        names = [user.name for users in parts.values() for user in users]
        group_n, clients = number_names(np.array(names), f"data set {name}: a user")
        announce(f"data set {name}", "clients", clients, keep.note)
        read_files = {path for paths in files.values() for path in paths}
        start = 0
        for part, users in parts.items():
            xs = [user.x for user in users]
            ys = [user.y for user in users]
            x: Iterable[ndarray] = xs
            if name == "celeba":
                faces = [root / FACES / file for file in np.concatenate(xs).tolist()]
                read_files.update(faces)
                x = decode(
                    pictures_of(faces),
                    f"CelebA {part}",
                    size=84,
                    resampling=Resampling.BICUBIC,
                    note=keep.note,
                )
            groups = group_n[start : start + len(users)]
            start += len(users)
            keep(part, x, np.concatenate(ys), np.repeat(groups, [*map(len, ys)]))
        _note_left(root, read_files, keep)
        return len(classes), classes

    every = [*files["train"], *files["test"]]
    source = ""  # the cache may be all that is left
    if every:
        source = (
            f"{hash_files(every)}; {count_files(root.parent, 'data', 'data/train', 'data/test')}"
        )
    return cached(data_dir, f"leaf_{name}", build, source)


def _json_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("[!.]*"))
    return [path for path in files if path.is_file() and path.suffix.lower() == ".json"]


def _note_left(root: Path, read: set[Path], keep: SplitWriter) -> None:
    """Notes the entries of the folder that are not read. Folders of LEAF's intermediate results
    count as one entry.
    """
    folders = {path.relative_to(root).parts[0] for path in read}
    why_left = {}
    for place in sorted(root.iterdir()):
        if place.name not in folders:
            why_left[place] = "beside the folders of samples"
            continue
        for path in entries(place):
            if path not in read:
                other = "neither a JSON file of a split nor a user's face"
                why_left[path] = why_unread(path, root) or other
    note_unread(root, why_left, keep.note)


class _User(NamedTuple):
    """A user who has samples."""

    name: str
    x: ndarray
    y: ndarray


def _users(paths: list[Path], read: Callable[..., Samples], keep: SplitWriter) -> list[_User]:
    """The users of a split who have samples."""
    users = []
    without = []  # users without a sample
    unknown = 0  # samples whose label is no character of LEAF
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
            for user in content["users"]:
                # popped, because lists of floats need much memory
                samples = content["user_data"].pop(user)
                count = len(samples["y"])
                if len(samples["x"]) != count:
                    raise Refusal(f"user {user} has not as many samples as labels")
                if not count:
                    without.append(user)
                    continue
                x, y = read(samples["x"], samples["y"])
                unknown += count - len(y)
                if len(y):
                    users.append(_User(user, x, y))
            if content["user_data"]:
                raise Refusal(f"users does not list {listing([*content['user_data']])}")
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal(
                f"{path} is not what LEAF's preprocessing writes ({error!r}): make it again."
            ) from error
    part = paths[0].parent.name
    if not users:
        raise Refusal(f"{paths[0].parent} has no user with a sample: make its files again.")
    if without:
        text = f"{part}: {len(without)} users have no sample: {listing(without)}"
        keep.note(logging.WARNING, text)
    if unknown:
        text = f"{part}: {unknown} samples are left out: their label is not in LEAF's alphabet"
        keep.note(logging.WARNING, text)
    return users
