"""Arrays of numbers from MATLAB 5 files, as SVHN is published: torchvision would need SciPy for them."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, in MATLAB's shape and order, of the type in which the file keeps their values.

    Raises ValueError for anything but a little-endian MATLAB 5 file of real arrays.
    """
    content = path.read_bytes()
    try:
        if content[124:128] != b"\x00\x01IM":
            raise ValueError("its header is another")
        return dict(_array(*element) for element in _elements(memoryview(content)[128:]))
    except (ValueError, KeyError, struct.error, zlib.error) as error:
        raise ValueError(f"{path} is no MATLAB 5 file of plain arrays ({error!r})") from error


def _array(kind: int, data: memoryview) -> tuple[str, np.ndarray]:
    if kind == COMPRESSED:
        ((kind, data),) = _elements(memoryview(zlib.decompress(data)))
    if kind != MATRIX:
        raise ValueError(f"an element has the type {kind}")
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
