"""Characters as tokens, and the plays of one small file: next-character prediction, speakers as natural clients."""

import re
from pathlib import Path

import numpy as np

from gcfed.data.base import IGNORE, FederatedDataset, Split
from gcfed.data.sets.files import Origin, obtain

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters; a token is an index into them."""
PAD = len(ALPHABET)
"""The token of padding, and of a character outside the alphabet; it is no class."""
LENGTH = 80
"""Characters of a sequence."""

FILE = "shakespeare/input.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"

_TOKEN_OF_CODE = np.full(128, PAD, np.uint8)
_TOKEN_OF_CODE[[ord(character) for character in ALPHABET]] = np.arange(PAD)


def encode(text: str) -> np.ndarray:
    """The token of each character, uint8 [len(text)]."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return _TOKEN_OF_CODE[np.minimum(codes, 127)]  # 127 is no printable character


def tiny_shakespeare(data_dir: str, download: bool = True) -> FederatedDataset:
    """A million characters of Shakespeare, 299 speakers: tokens [n, 80], the next character's label at every position.

    What a speaker says is put together and cut into sequences; the first 90 % of them, at least one, are for training,
    the rest for testing. The groups are the speakers in the order of their appearance. The last sequence of a speaker
    is padded.

    Raises FileNotFoundError if ``shakespeare/input.txt`` is not in ``data_dir`` and cannot be downloaded; ValueError
    for a wrong checksum.
    """
    folder = Path(data_dir)
    obtain(folder / FILE, MD5, [URL], Origin("tiny_shakespeare", folder, URL), download)
    said = speeches((folder / FILE).read_text(encoding="utf-8")).values()
    xs, ys = zip(*(sequences(encode(text)) for text in said), strict=True)
    sizes = [len(x) for x in xs]
    is_train = np.concatenate([np.arange(size) < max(1, size * 9 // 10) for size in sizes])
    whole = Split(np.concatenate(xs), np.concatenate(ys), np.repeat(np.arange(len(xs)), sizes))
    train, test = whole.subset(is_train), whole.subset(~is_train)
    return FederatedDataset("tiny_shakespeare", len(ALPHABET), train, test, tuple(ALPHABET))


def speeches(play: str) -> dict[str, str]:
    """Everything that each speaker says, by name.

    A speech is a paragraph under a line ``Name:``; a name without a speech under it is left out.
    """
    said: dict[str, list[str]] = {}
    for paragraph in re.split(r"\n{2,}", play.strip("\n")):
        name, colon, speech = paragraph.partition(":\n")
        if colon:
            said.setdefault(name, []).append(speech + "\n")
    return {name: "".join(spoken) for name, spoken in said.items()}


def sequences(tokens: np.ndarray, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [m] → tokens uint8 [n, length] and, at every position, the next one as its label, int64 [n, length].

    The last sequence is filled up with ``PAD``. Where the next token is ``PAD`` or none, the label is −100.
    """
    n = -(-(len(tokens) - 1) // length)
    padded = np.full(n * length + 1, PAD, np.uint8)
    padded[: len(tokens)] = tokens
    x, y = padded[:-1].reshape(n, length), padded[1:].reshape(n, length).astype(np.int64)
    y[y == PAD] = IGNORE
    return x, y
