"""TinyShakespeare: the speakers of Shakespeare's plays are the clients."""

import re
from pathlib import Path

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets.files import obtain
from gcfed.data.sets.text import ALPHABET, encode, sequences_of

TINY = "shakespeare/input.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"


def tiny_shakespeare(data_dir: str, download: bool = True) -> FederatedDataset:
    """A million characters of Shakespeare by 299 speakers: tokens [n, 80].

    The label of each is the next character.

    The text of a speaker is cut into sequences; the last one is padded. The first 90 % of them, at
    least one, are the training split. Groups are the speakers in the order of their appearance.
    """
    folder = Path(data_dir)
    obtain(folder / TINY, MD5, URL, "tiny_shakespeare", download)
    texts = speeches((folder / TINY).read_text(encoding="utf-8")).values()
    x, y, sizes = sequences_of(encode(text) for text in texts)
    is_train = np.concatenate([np.arange(size) < max(1, size * 9 // 10) for size in sizes])
    whole = Split(x, y, np.repeat(np.arange(len(sizes)), sizes))
    train = whole.subset(is_train)
    test = whole.subset(~is_train)
    return FederatedDataset("tiny_shakespeare", len(ALPHABET), train, test, tuple(ALPHABET))


def speeches(play: str) -> dict[str, str]:
    """The text of each speaker, by name. A speech is a paragraph under a line ``Name:``."""
    text_of: dict[str, str] = {}
    for paragraph in re.split(r"\n{2,}", play.strip("\n")):
        name, colon, speech = paragraph.partition(":\n")
        if colon:
            text_of[name] = text_of.get(name, "") + speech + "\n"
    return text_of
