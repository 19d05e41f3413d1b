"""The messages between the server and its clients. Nothing else passes between them.

The size of a message is the size of its tensors. Single numbers (ids, the round's index, the
learning rate, a client's loss, its numbers of samples and steps) travel with them and are not
counted. Notes for measurements exist in simulations, and are not counted either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Params = dict[str, Tensor]
"""Tensors of a network, by name."""


class MessageError(ValueError):
    """A message that is not what was expected."""


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of a set of tensors in bytes."""
    return sum(t.nbytes for t in tensors.values())


class Message:
    """A dataclass with tensors in it."""

    def to(self, device: torch.device) -> Self:
        this: Any = self
        moved: Self = replace(this, **tree_map_only(Tensor, lambda t: t.to(device), vars(self)))
        return moved


@dataclass
class Download(Message):
    """What the server sends to every client of a round.

    Attributes:
        round_index: index of the round, from 0. It is also the version of the model.
        seed: the run's seed; every draw derives from it.
        lr: η_l, the clients' learning rate in this round.
        broadcast_model: the model from which the clients train, name → ``[*shape]``. A method's
            ``on_broadcast`` may replace tensors, but must not edit them.
        cohort: ids of the clients whose answers the round uses, ``[K]``, sorted.
        extra: what methods send in addition to the model, by name: name → ``[*shape]``.
        sent_bytes: size in bytes of entries of ``broadcast_model`` and ``extra`` that are sent in
            fewer bytes than tensors have.
        used: index of the round that uses the answers of late clients, for measurements. None: the
            round of the download.
    """

    round_index: int
    seed: int
    lr: float
    broadcast_model: Params
    cohort: np.ndarray
    extra: dict[str, Params] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    used: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of the message to one client."""
        size = sum(self.sent_bytes.values())
        for name, t in self.broadcast_model.items():
            if name not in self.sent_bytes:
                size += t.nbytes
        for name, tensors in self.extra.items():
            if name not in self.sent_bytes:
                size += nbytes(tensors)
        return size


def quantized_nbytes(entries: int, bits: int) -> int:
    """Size of a quantized tensor of one client: its entries, and its norm if it has entries."""
    norm = 4 if entries else 0
    return -(-entries * bits // 8) + norm


class Levels(NamedTuple):
    """How a quantized tensor of K clients is sent: its entries are whole multiples of norm / s, s =
    2^(bits−1) − 1.

    Attributes:
        bits: bits per entry: its sign and a level 0 … s.
        norms: the norm of each client's tensor, float32 ``[K]``; it is sent too.
    """

    bits: int
    norms: Tensor

    @property
    def unit(self) -> Tensor:
        levels: int = 2 ** (self.bits - 1) - 1
        return self.norms / levels


@dataclass
class Upload(Message):
    """What K clients send to the server.

    Attributes:
        clients: their ids, ``[K]``.
        num_samples: size of their data sets, ``[K]``.
        num_steps: number of their local steps, ``[K]``.
        delta: updates ``w_k − w`` relative to the broadcast model, name → ``[K, *shape]``; hooks
            may rewrite them.
        finite: which clients sent finite numbers only, bool ``[K]`` on the device.
        round_index: index of the download's round.
        loss: mean task loss of each client's local training, ``[K]`` on the device.
        num_seen: number of samples in their local steps, counted in every epoch, ``[K]``.
        extra: what they send in addition to Δ, by name; see :meth:`send`.
        levels: the quantized entries of Δ.
        notes: what clients measured, by the measurement's name; not counted.
    """

    clients: np.ndarray
    num_samples: np.ndarray
    num_steps: np.ndarray
    delta: Params
    finite: Tensor
    round_index: int
    loss: Tensor
    num_seen: np.ndarray
    extra: dict[str, Params] = field(default_factory=dict)
    levels: dict[str, Levels] = field(default_factory=dict)
    notes: dict[str, Params] = field(default_factory=dict)

    def send(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Sends ``tensors``, name → ``[K, *shape]``, in addition to Δ.

        A server part lists ``name`` in ``uploads`` and finds them in ``on_receive``. The mean of
        floats, or the result of the run's aggregator, becomes ``round.extra_means[name]``. A client
        counts only if all its numbers are finite.
        """
        self.extra[name] = dict(tensors)


class Expected(NamedTuple):
    """What a client sends in a round.

    Attributes:
        shapes: ``"delta"`` and each name of ``Upload.extra`` → tensors like those of one client.
        notes: name of a note → tensors like those of the note.
        bits: name of each quantized entry of Δ → bits per number (``Upload.levels``).
        sent_bytes: name of each entry of Δ that is sent in fewer bytes than tensors have → its
            bytes, of one client.
    """

    shapes: Mapping[str, Params]
    notes: Mapping[str, Params]
    bits: Mapping[str, int] = MappingProxyType({})
    sent_bytes: Mapping[str, int] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        """Size of one client's message."""
        size = sum(self.sent_bytes.values())
        for name, tensors in self.shapes.items():
            size += nbytes(tensors)
            if name == "delta":
                size -= sum(tensors[entry].nbytes for entry in self.sent_bytes)
        return size
