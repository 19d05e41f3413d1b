"""Clients' states that stay on a GPU."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gcfed.federated.state.versioned_files import Key
from gcfed.utils.device import free_memory


class UndecidedWrite(NamedTuple):
    """A state that was written if ``accepted``, bool ``[]``, which the host has not read."""

    key: Key
    version: int
    accepted: Tensor
    is_new: bool  # it had no version on the GPU


class GpuStates:
    """The present version of each state on a GPU, a vector ``[P]``.

    The host does not wait for each write: :meth:`decide` finds at once which of them count.
    """

    def __init__(self) -> None:
        self._vectors: dict[Key, Tensor] = {}
        self._undecided: list[UndecidedWrite] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._vectors

    def vector(self, key: Key) -> Tensor:
        return self._vectors[key]

    def copy_into(self, tensors: Sequence[Tensor], key: Key) -> None:
        """Copies a state into the tensors that it consists of, ``[*shape]``."""
        pieces = self._vectors[key].split([t.numel() for t in tensors])
        for t, piece in zip(tensors, pieces, strict=True):
            t.copy_(piece.view(t.shape), non_blocking=True)

    def write(self, key: Key, vector: Tensor) -> None:
        """Replaces a state."""
        if key in self._vectors:
            # a new tensor could reuse memory that another stream still reads
            self._vectors[key].copy_(vector)
        else:
            self._vectors[key] = vector

    def write_if(self, accepted: Tensor, key: Key, version: int, vector: Tensor) -> None:
        """Replaces a state if ``accepted``, bool ``[]`` on the device."""
        is_new = key not in self._vectors
        if is_new:
            self._vectors[key] = vector
        else:
            held = self._vectors[key]
            held.copy_(torch.where(accepted, vector, held))
        self._undecided.append(UndecidedWrite(key, version, accepted, is_new))

    def are_undecided(self, keys: Collection[Key]) -> bool:
        """Whether a write of one of these states is not decided."""
        return any(write.key in keys for write in self._undecided)

    def decide(self) -> list[tuple[Key, int]]:
        """The states that :meth:`write_if` has replaced since the last call, and their versions.

        The host waits once for all of them.
        """
        if not self._undecided:
            return []
        undecided = self._undecided
        self._undecided = []
        accepted = torch.stack([write.accepted for write in undecided]).tolist()
        written = []
        for write, is_accepted in zip(undecided, accepted, strict=True):
            if is_accepted:
                written.append((write.key, write.version))
            elif write.is_new:
                del self._vectors[write.key]
        return written

    def clear(self) -> None:
        self._vectors.clear()
        self._undecided.clear()


def has_room(device: torch.device) -> bool:
    """Whether the device is a GPU with a quarter of its memory free."""
    if device.type != "cuda":
        return False
    _, total = torch.cuda.mem_get_info(device)
    return 4 * free_memory(device) > total
