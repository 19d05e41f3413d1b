"""Texts as tokens: LEAF's characters or a tokenizer of transformers, and sequences of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from gcfed.tasks import IGNORE
from gcfed.utils.checked import SettingError
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import Refusal, message_of

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters. A token is the index of a character."""
PAD = len(ALPHABET)  # the token of padding and of other characters; it is no class
LENGTH = 80  # characters of a sequence

_TOKEN_OF_CODE = np.full(128, PAD, np.uint8)
_TOKEN_OF_CODE[[ord(character) for character in ALPHABET]] = np.arange(PAD)


def encode(text: str) -> ndarray:
    """The token of each character, uint8 [len(text)]."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return _TOKEN_OF_CODE[np.minimum(codes, 127)]  # 127 is no printable character


def sequences(tokens: ndarray, length: int = LENGTH, pad: int = PAD) -> tuple[ndarray, ndarray]:
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


def sequences_of(
    texts: Iterable[ndarray], length: int = LENGTH, pad: int = PAD
) -> tuple[ndarray, ndarray, list[int]]:
    """The sequences of all texts, their labels, and the number of sequences of each text.

    Each text is tokens, [m]. Sequences and labels are [n, length], as :func:`sequences` says.
    """
    pairs = [sequences(tokens, length, pad) for tokens in texts]
    inputs = [x for x, _ in pairs]
    labels = [y for _, y in pairs]
    return np.concatenate(inputs), np.concatenate(labels), [len(x) for x in inputs]


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of texts.

    encode: takes a text and its largest number of tokens, or None, and returns its tokens.
    num_tokens: the number of different tokens.
    padding: the token of padding.
    """

    encode: Callable[[str, int | None], ndarray]
    num_tokens: int
    padding: int


def encoder_of(tokenizer: str | None, download: bool = True) -> Encoder:
    """LEAF's characters, or a tokenizer of transformers with its own special tokens.

    No code of its folder is run.

    Args:
        download: False: only a tokenizer that is already there.
    """
    if tokenizer is None:
        return Encoder(lambda text, length: encode(text[:length]), len(ALPHABET), PAD)
    installed("transformers", "data.tokenizer", "huggingface")
    from transformers import AutoTokenizer  # takes seconds

    try:
        tokens = AutoTokenizer.from_pretrained(
            tokenizer, trust_remote_code=False, local_files_only=not download
        )
        if len(tokens) < 2:  # transformers makes an empty one for a folder with a model only
            raise Refusal("there is no tokenizer")
    except Exception as error:  # of any type, for a folder with any content
        raise SettingError("tokenizer", f"={tokenizer}: {message_of(error)}") from None

    def encoded(text: str, length: int | None) -> ndarray:
        cut = {} if length is None else {"truncation": True, "max_length": length}
        return np.array(tokens(text, verbose=False, **cut)["input_ids"], np.int32)

    return Encoder(encoded, len(tokens), -1)
