"""The two arrays of a MATLAB 5 file, as SVHN is published: torchvision would need SciPy for them."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

COMPRESSED = 15
NUMBERS = {2: "u1", 9: "<f8"}


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a little-endian file by name, in MATLAB's shape and order: of bytes, or of doubles.

    For files whose checksum is known: in others it would meet what it does not know.
    """
    return dict(_array(*element) for element in _elements(memoryview(path.read_bytes())[128:]))


def _array(kind: int, data: memoryview) -> tuple[str, np.ndarray]:
    if kind == COMPRESSED:
        ((_, data),) = _elements(memoryview(zlib.decompress(data)))
    _, (_, shape), (_, name), (number, values) = _elements(data)  # the first holds flags
    array = np.frombuffer(values, NUMBERS[number]).reshape(np.frombuffer(shape, "<i4"), order="F")
    return bytes(name).decode(), array


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(type, content) of each: a tag of two words, then the content, filled up to eight bytes unless compressed."""
    start = 0
    while start < len(data):
        kind, size = struct.unpack_from("<II", data, start)
        if kind >> 16:  # at most four bytes: type and size share a word
            yield kind & 0xFFFF, data[start + 4 : start + 4 + (kind >> 16)]
            start += 8
        else:
            yield kind, data[start + 8 : start + 8 + size]
            start += 8 + size + (0 if kind == COMPRESSED else -size % 8)
