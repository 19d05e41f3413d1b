"""What a part declares to keep for each client, and finds again in the next round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.network.rows import per_client
from gcfed.federated.protocol.messages import Download, Params


@dataclass(frozen=True)
class KeptState:
    """Declares what each client keeps under one name. The engine reads, writes and checkpoints it.

    Attributes:
        like: takes the part and the download; returns tensors like those of one client, name →
            ``[*shape]``.
        starts_at_model: whether a client that has kept nothing yet has the broadcast model's
            tensors instead of zeros.
    """

    like: Callable[[Any, Download], Params]
    starts_at_model: bool = False


class EditedState(Params):
    """A state in which clients with numbers that are not finite still have their old tensors, name
    → ``[K, *shape]``.

    The engine stores it for all K clients. Any other state it stores for the finite clients only.
    On a GPU the engine would otherwise wait for the device.
    """


class ClientStates(dict[str, Params]):
    """The states of K clients, by the names in ``keeps``: name → ``[K, *shape]``.

    The part may edit them.

    Attributes:
        version: index of the round from whose download each client wrote its state, ``[K]``; −1 if
            it has none yet.
    """

    def __init__(self, version: Sequence[int] = ()) -> None:
        super().__init__()
        self.version = np.array(version, dtype=np.int64)

    def add(self, name: str, change: Mapping[str, Tensor], finite: Tensor) -> EditedState:
        """Adds ``[K, *shape]`` in place for the ``finite`` clients, bool ``[K]``.

        Returns the tensors of this name, which ``keep`` may return as they are.
        """
        for key, t in self[name].items():
            t.add_(torch.where(per_client(finite, t), change[key], 0.0))
        return EditedState(self[name])


def like_trained(part: Any, download: Download) -> Params:
    """``KeptState.like`` of a part that keeps tensors like the trained parameters."""
    like: Params = part.trained(download.broadcast_model)
    return like
