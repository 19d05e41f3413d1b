"""LEAF's FEMNIST, CelebA and Shakespeare, from the JSON files that its preprocessing writes, and
TinyShakespeare.

"LEAF: A Benchmark for Federated Settings" (Caldas et al. 2019). The files are
``femnist/data/{train,test}/*.json`` (and so on) in the data folder, which may be LEAF's folder
``data``. Groups are LEAF's users, in the order of their names.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets.files import (
    Keep,
    cached,
    counted,
    entries,
    listing,
    obtain,
    report_unread,
    why_unread,
    written,
)
from gcfed.data.sets.images import decode
from gcfed.data.sets.names import announce, numbered
from gcfed.tasks import IGNORE
from gcfed.utils.refusal import MissingFile, Refusal

# From LEAF's pages: the whole data set, with each user's samples split into training and test.
COMMANDS = {
    "femnist": "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample",
    "celeba": "./preprocess.sh -s niid --sf 1.0 -k 5 -t sample",
    "shakespeare": "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.8",
}
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

FACES = "raw/img_align_celeba"  # CelebA's images

Samples = tuple[np.ndarray, np.ndarray]
"""x [n, …] and y int64 [n] of one user."""

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters. A token is the index of a character."""
PAD = len(ALPHABET)  # the token of padding and of other characters; it is no class
LENGTH = 80  # characters of a sequence

TINY = "shakespeare/input.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"

_TOKEN_OF_CODE = np.full(128, PAD, np.uint8)
_TOKEN_OF_CODE[[ord(character) for character in ALPHABET]] = np.arange(PAD)


def encode(text: str) -> np.ndarray:
    """The token of each character, uint8 [len(text)]."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return _TOKEN_OF_CODE[np.minimum(codes, 127)]  # 127 is no printable character


def tiny_shakespeare(data_dir: str, download: bool = True) -> FederatedDataset:
    """A million characters of Shakespeare by 299 speakers: tokens [n, 80].

    The label of each is the next character.

    The text of a speaker is cut into sequences; the last one is padded. The first 90 % of them, at
    least one, are the training split. Groups are the speakers in the order of their appearance.
    """
    folder = Path(data_dir)
    obtain(folder / TINY, MD5, URL, "tiny_shakespeare", download)
    said = speeches((folder / TINY).read_text(encoding="utf-8")).values()
    inputs, labels = zip(*(sequences(encode(text)) for text in said), strict=True)
    sizes = [len(x) for x in inputs]
    is_train = np.concatenate([np.arange(size) < max(1, size * 9 // 10) for size in sizes])
    whole = Split(
        np.concatenate(inputs), np.concatenate(labels), np.repeat(np.arange(len(inputs)), sizes)
    )
    train = whole.subset(is_train)
    test = whole.subset(~is_train)
    return FederatedDataset("tiny_shakespeare", len(ALPHABET), train, test, tuple(ALPHABET))


def speeches(play: str) -> dict[str, str]:
    """The text of each speaker, by name. A speech is a paragraph under a line ``Name:``."""
    said: dict[str, str] = {}
    for paragraph in re.split(r"\n{2,}", play.strip("\n")):
        name, colon, speech = paragraph.partition(":\n")
        if colon:
            said[name] = said.get(name, "") + speech + "\n"
    return said


def sequences(
    tokens: np.ndarray, length: int = LENGTH, pad: int = PAD
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts tokens, [m], into sequences, [n, length].

    The label of each token is the next one, int64 [n, length].

    The last sequence is padded with ``pad``. The label is −100 if the next token is ``pad`` or
    missing.
    """
    n = max(0, -(-(len(tokens) - 1) // length))
    padded = np.full(n * length + 1, pad, tokens.dtype)
    padded[: len(tokens)] = tokens[: len(padded)]
    x = padded[:-1].reshape(n, length)
    y = padded[1:].reshape(n, length).astype(np.int64)
    y[y == pad] = IGNORE
    return x, y


# --------------------------------------------------------------------------------------------- LEAF
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


def _whole(y: list[Any]) -> np.ndarray:
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

    def build(keep: Keep) -> tuple[int, Sequence[str]]:
        if not all(files.values()):
            raise MissingFile(
                f"data set {name}: no JSON file in {root.resolve()}/train or test. Clone"
                f" github.com/TalwalkarLab/leaf, run {COMMANDS[name]} in its folder data/{name},"
                " and set paths.data_dir (DATA_DIR) to its folder data."
            )
        parts = {part: _users(paths, read, keep) for part, paths in files.items()}
        users = [user for part in parts.values() for user in part.users]
        group_n, clients = numbered(np.array(users), f"data set {name}: a user")
        announce(f"data set {name}", "clients", clients, keep.note)
        read_files = {path for paths in files.values() for path in paths}
        start = 0
        for part, found in parts.items():
            x: Iterable[np.ndarray] = found.xs
            if name == "celeba":
                faces = [root / FACES / file for file in np.concatenate(found.xs).tolist()]
                read_files.update(faces)
                x = decode(faces, f"CelebA {part}", size=84, bicubic=True, note=keep.note)
            groups = group_n[start : start + len(found.users)]
            start += len(found.users)
            keep(part, x, np.concatenate(found.ys), np.repeat(groups, [*map(len, found.ys)]))
        _report_left(root, read_files, keep)
        return len(classes), classes

    every = [*files["train"], *files["test"]]
    source = ""  # the cache may be all that is left
    if every:
        source = f"{written(every)}; {counted(root.parent, 'data', 'data/train', 'data/test')}"
    return cached(data_dir, f"leaf_{name}", build, source)


def _json_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("[!.]*"))
    return [path for path in files if path.is_file() and path.suffix.lower() == ".json"]


def _report_left(root: Path, read: set[Path], keep: Keep) -> None:
    """Notes the entries of the folder that are not read. Folders of LEAF's intermediate results
    count as one entry.
    """
    folders = {path.relative_to(root).parts[0] for path in read}
    left: defaultdict[str, list[Path]] = defaultdict(list)
    for place in sorted(root.iterdir()):
        if place.name not in folders:
            left["beside the folders of samples"].append(place)
            continue
        for path in entries(place):
            if path not in read:
                left[
                    why_unread(path, root) or "neither a JSON file of a split nor a user's face"
                ].append(path)
    report_unread(root, left, keep.note)


@dataclass
class _Users:
    """The users of a split who have samples."""

    users: list[str] = field(default_factory=list)
    xs: list[np.ndarray] = field(default_factory=list)
    ys: list[np.ndarray] = field(default_factory=list)


def _users(paths: list[Path], read: Callable[..., Samples], keep: Keep) -> _Users:
    found = _Users()
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
                    found.users.append(user)
                    found.xs.append(x)
                    found.ys.append(y)
            if content["user_data"]:
                raise Refusal(f"users does not list {listing([*content['user_data']])}")
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal(
                f"{path} is not what LEAF's preprocessing writes ({error!r}): make it again."
            ) from error
    part = paths[0].parent.name
    if not found.users:
        raise Refusal(f"{paths[0].parent} has no user with a sample: make its files again.")
    if without:
        text = f"{part}: {len(without)} users have no sample: {listing(without)}"
        keep.note(logging.WARNING, text)
    if unknown:
        text = f"{part}: {unknown} samples are left out: their label is not in LEAF's alphabet"
        keep.note(logging.WARNING, text)
    return found
