"""The files of clients' states, and of the messages that late clients still have.

A state is a vector. Each version of it is a file ``<name>/<thousand>/<client>-<round>.bin``. It
ends in a checksum of its name, client, round and content, which every read compares. A message is a
vector of bytes, with a round's index in the client's place.
"""

import os
import zlib
from collections.abc import Iterable, Sequence, Set
from functools import reduce
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from gcfed.utils.files import replacing
from gcfed.utils.refusal import Refusal

CHECKSUM_BYTES = 4
#: The name of the downloads that late clients still have.
SENT = "sent"
Key = tuple[str, int]  # the name of a state, and its client


class VersionedFiles:
    """Files below a folder, one for each version of a state. It does not know which are valid."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: Key, version: int) -> Path:
        name, client = key
        return self.root / name / f"{client // 1000:d}" / f"{client:d}-{version:d}.bin"

    def has(self, key: Key, version: int) -> bool:
        return self.path(key, version).is_file()

    def require(self, key: Key, version: int) -> None:
        """Raises Refusal if the file is not there. Only a read finds damage."""
        if not self.has(key, version):
            raise self._lost(key, version, "not there")

    def save(self, key: Key, version: int, pieces: Sequence[Tensor]) -> None:
        """Writes the pieces of a state, ``[P]`` each, one after the other: a state may be as large
        as a model, so there is no copy of the whole.
        """
        dtype = _common_type(pieces)
        checksum = _first_checksum(key, version)
        with replacing(self.path(key, version)) as temporary, temporary.open("wb") as file:
            for piece in pieces:
                content = _memory(piece.to("cpu", dtype))
                checksum = zlib.crc32(content, checksum)
                file.write(content)
            file.write(_checksum_bytes(checksum))

    def load_into(self, tensors: Sequence[Tensor], key: Key, version: int) -> None:
        """Reads a state into these tensors, ``[*shape]``, one after the other.

        Raises Refusal if the file is lost, damaged, or of another model.
        """
        dtype = _common_type(tensors)
        checksum = _first_checksum(key, version)
        with self._open(key, version) as file:
            size = sum(t.numel() for t in tensors) * dtype.itemsize
            if os.fstat(file.fileno()).st_size != size + CHECKSUM_BYTES:
                self.load(key, version)  # raises if it is damaged
                raise self._lost(key, version, "of another model")
            for t in tensors:
                is_layout_of_file = not t.is_cuda and t.dtype == dtype and t.is_contiguous()
                piece = t if is_layout_of_file else torch.empty(t.shape, dtype=dtype)
                content = _memory(piece)
                file.readinto(content)
                checksum = zlib.crc32(content, checksum)
                if piece is not t:
                    t.copy_(piece, non_blocking=True)
            if file.read() != _checksum_bytes(checksum):
                raise self._lost(key, version, "damaged")

    def load(self, key: Key, version: int) -> bytes:
        """The bytes of a version, without the checksum.

        Raises Refusal if the file is lost or damaged.
        """
        with self._open(key, version) as file:
            entries = file.read()
        content = entries[:-CHECKSUM_BYTES]
        checksum = zlib.crc32(content, _first_checksum(key, version))
        if entries[-CHECKSUM_BYTES:] != _checksum_bytes(checksum):
            raise self._lost(key, version, "damaged")
        return content

    def wait_for_disk(self, key: Key, version: int) -> None:
        """Waits until a version has reached the disk."""
        with self.path(key, version).open("rb") as file:
            os.fsync(file.fileno())

    def delete(self, key: Key, version: int) -> None:
        """Deletes a version, if its file is there."""
        self.path(key, version).unlink(missing_ok=True)

    def delete_all_but(self, kept: Set[Path], names: Iterable[str]) -> None:
        """Deletes all files of these names that are not kept, also temporary ones."""
        for name in names:
            for path in set((self.root / name).glob("*/*.bin")) - kept:
                path.unlink()

    def _open(self, key: Key, version: int) -> BufferedReader:
        try:
            return self.path(key, version).open("rb")
        except FileNotFoundError:
            raise self._lost(key, version, "not there") from None

    def _lost(self, key: Key, version: int, how: str) -> Refusal:
        what = "what a late client was sent" if key[0] == SENT else "a client's state"
        return Refusal(
            f"{self.path(key, version)} is {how}: it is {what}, which the run needs. Restore the"
            " file, or start anew without ckpt_path. (Each run has its own folder below"
            " client_store.folder.)"
        )


def _common_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """The type of a file's numbers."""
    return reduce(torch.promote_types, (t.dtype for t in tensors))


def _memory(t: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    content: memoryview = t.view(-1).view(torch.uint8).numpy().data
    return content


def _first_checksum(key: Key, version: int) -> int:
    """The checksum of a version before its content."""
    return zlib.crc32(repr((*key, version)).encode())


def _checksum_bytes(checksum: int) -> bytes:
    return checksum.to_bytes(CHECKSUM_BYTES, "little")
