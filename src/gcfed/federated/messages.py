"""The messages between the server and its clients. Nothing else passes between them.

The size of a message is the size of its tensors. Ids, numbers of samples and steps, and the round's
index travel with them and are not counted. Notes for measurements exist in simulations, and are not
counted either.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gcfed.federated.training.forward import Params


class MessageError(ValueError):
    """A message that is not what was expected."""


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of a set of tensors in bytes."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


class Message:
    """A dataclass with tensors in it."""

    def to(self, device: torch.device) -> Self:
        this: Any = self
        return replace(this, **tree_map_only(Tensor, lambda t: t.to(device), vars(self)))


@dataclass
class Download(Message):
    """What the server sends to every client of a round.

    Attributes:
        round: index of the round, from 0. It is also the version of the model.
        seed: the run's seed; every draw derives from it.
        lr: η_l, the clients' learning rate in this round.
        model: where clients start, name → ``[*shape]``; ``on_broadcast`` may replace tensors, but
            must not edit them.
        cohort: ids of the clients that receive it and will answer, ``[K]``, sorted.
        extra: what methods send in addition to the model, by name: name → ``[*shape]``.
        packed: size in bytes of entries of ``model`` and ``extra`` that are sent in fewer bytes
            than tensors have.
    """

    round: int
    seed: int
    lr: float
    model: Params
    cohort: np.ndarray
    extra: dict[str, Params] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of the message to one client."""
        model = {name: t for name, t in self.model.items() if name not in self.packed}
        extra = [tensors for name, tensors in self.extra.items() if name not in self.packed]
        return sum(map(nbytes, (model, *extra))) + sum(self.packed.values())


class Levels(NamedTuple):
    """How a quantized tensor of K clients is sent: its entries are whole multiples of norm / s, s =
    2^(bits−1) − 1.

    Attributes:
        bits: bits per entry: its sign and a level 0 … s.
        norms: the norm of each client's tensor, float32 ``[K]``; it is sent too.
    """

    bits: int
    norms: Tensor

    def nbytes(self, entries: int) -> int:
        """Size of one client's tensor with this number of entries."""
        return -(-entries * self.bits // 8) + 4 * (entries > 0)

    @property
    def unit(self) -> Tensor:
        return self.norms / (2 ** (self.bits - 1) - 1)


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
        round: index of the download's round.
        loss: mean task loss of each client's local training, ``[K]`` on the device.
        num_seen: number of samples in their local steps, counted in every epoch, ``[K]``.
        extra: what they send in addition to Δ, by name; see :meth:`send`.
        levels: the quantized entries of Δ.
        notes: what clients measured, by the measurement's name; not counted.
        packed: size in bytes of one client's entries of Δ that are sent in fewer bytes than tensors
            have.
    """

    clients: np.ndarray
    num_samples: np.ndarray
    num_steps: np.ndarray
    delta: Params
    finite: Tensor
    round: int
    loss: Tensor
    num_seen: np.ndarray
    extra: dict[str, Params] = field(default_factory=dict)
    levels: dict[str, Levels] = field(default_factory=dict)
    notes: dict[str, Params] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)

    def send(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Sends ``tensors``, name → ``[K, *shape]``, in addition to Δ.

        A server part lists ``name`` in ``uploads`` and finds them in ``on_receive``. The mean of
        floats, or the result of the run's aggregator, becomes ``round.received[name]``. A client
        counts only if all its numbers are finite.
        """
        self.extra[name] = dict(tensors)

    @property
    def bytes_per_client(self) -> int:
        """Size of one client's message."""
        whole = {
            name: t
            for name, t in self.delta.items()
            if name not in self.levels and name not in self.packed
        }
        sent = sum(map(nbytes, (whole, *self.extra.values()))) // len(self.clients) + sum(
            self.packed.values()
        )
        return sent + sum(
            own.nbytes(self.delta[name][0].numel()) for name, own in self.levels.items()
        )


class Expected(NamedTuple):
    """What a client sends in a round.

    Attributes:
        shapes: ``"delta"`` and each name of ``Upload.extra`` → tensors like those of one client.
        notes: name of a note → tensors like those of the note.
    """

    shapes: Mapping[str, Params]
    notes: Mapping[str, Params]


def finite_clients(tensors_K: Mapping[str, Tensor], narrow: Set[str] | None = None) -> Tensor:
    """Which clients sent finite numbers only, bool ``[K]``. The host does not wait for the device.

    With ``narrow`` (``Aggregator.narrow``) they must also fit into a sum: below 2¹¹ for these
    names, else below 2⁴¹.
    """
    filled = {name: t for name, t in tensors_K.items() if t.numel()}
    first = next(iter(tensors_K.values()))
    if not filled:
        return torch.ones(len(first), dtype=torch.bool, device=first.device)
    limits = [
        torch.inf if narrow is None else 2.0**11 if name in narrow else 2.0**41 for name in filled
    ]
    # few kernels for all tensors and clients; a CPU takes three to eight times as long
    if first.is_cuda:
        flat = [t.reshape(len(t), -1) for t in filled.values()]
        alike = {
            m: [t for t, limit in zip(flat, limits, strict=True) if limit == m] for m in set(limits)
        }
        ends = [(m, *torch.cat(tensors, 1).aminmax(dim=1)) for m, tensors in alike.items()]
        return torch.stack([(-m < low) & (high < m) for m, low, high in ends]).all(0)
    # rows take time too
    rows = zip(*filled.values(), strict=True) if len(first) > 1 else [filled.values()]
    ends_K = [[tuple(map(float, torch.aminmax(t))) for t in row] for row in rows]
    fits_K = [
        all(-m < low and high < m for m, (low, high) in zip(limits, ends, strict=True))
        for ends in ends_K
    ]
    return torch.tensor(fits_K, device=first.device)


def sendable(upload: Upload, narrow: Set[str] | None) -> Tensor:
    """Which clients sent only numbers that the server's sums can add, bool ``[K]``; ``narrow`` as
    above.
    """
    others = [
        finite_clients(tensors, None if narrow is None else frozenset())
        for tensors in upload.extra.values()
    ]
    return torch.stack([finite_clients(upload.delta, narrow), *others]).all(0)


def refuse_misfit(upload: Upload, shapes: Mapping[str, Params]) -> None:
    """Raises MessageError for other tensors than these: ``"delta"`` and each name of ``extra`` →
    like one client's.
    """
    for name in {**shapes, **upload.extra}:
        sent = upload.delta if name == "delta" else upload.extra.get(name, {})
        refuse_other(f"an upload's {name}", sent, shapes.get(name, {}), len(upload.clients))


def refuse_other(what: str, sent: Params, known: Params, *clients: int) -> None:
    """Raises MessageError for tensors with other names, shapes or types than the known ones; names
    the first.

    With ``clients``, K, tensors have a leading axis K that the known ones lack.
    """
    here = {name: (t.dtype, (*clients, *t.shape)) for name, t in known.items()}
    there = {name: (t.dtype, (*t.shape,)) for name, t in sent.items()}
    for name in [*known, *sorted(there.keys() - here.keys())]:
        if there.get(name) != here.get(name):
            shown = ["{} {}".format(*own[name]) if name in own else "" for own in (there, here)]
            differs = f"{name} is {shown[0] or 'missing'}, and here it is {shown[1] or 'unknown'}"
            raise MessageError(f"{what} is of another model or method: {differs}.")
