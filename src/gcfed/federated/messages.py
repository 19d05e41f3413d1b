"""What passes between the server and its clients: nothing else has travelled.

A message's size is that of the tensors in it, counted here and nowhere else; ids, numbers of samples and steps, and the
round's number go beside them and are not counted. What clients are looked at by (``notes``) belongs to the simulation
and is not counted either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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
    """A dataclass of tensors, and of what goes beside them."""

    def to(self, device: torch.device) -> Self:
        this: Any = self
        return replace(this, **tree_map_only(Tensor, lambda t: t.to(device), vars(self)))


@dataclass
class Download(Message):
    """What the server sends to every client of a round.

    Attributes:
        round: index of the round, the version of the model; the first is 0.
        seed: the run's seed; every draw derives from it.
        lr: η_l, the clients' learning rate in this round.
        model: where clients start, name → ``[*shape]``; ``on_broadcast`` may replace tensors, never edit them.
        cohort: ids of the clients that it goes to and that come back, ``[K]``, sorted.
        extra: what goes down beside the model, by name: name → ``[*shape]``.
        packed: bytes of an entry of the model, or of a name of ``extra``, that travels in fewer than its tensors have.
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
        """Of the message, to one client."""
        model = {name: t for name, t in self.model.items() if name not in self.packed}
        extra = [tensors for name, tensors in self.extra.items() if name not in self.packed]
        return sum(map(nbytes, (model, *extra))) + sum(self.packed.values())


class Levels(NamedTuple):
    """How a tensor of K clients travels whose entries are whole multiples of a norm: ``bits`` each, and the norm.

    Attributes:
        bits: of an entry: its sign and a level 0 … s, s = 2^(bits−1) − 1.
        norms: of which an entry is so many s-ths, float32 ``[K]``.
    """

    bits: int
    norms: Tensor

    def nbytes(self, entries: int) -> int:
        """Of so many entries of one client."""
        return -(-entries * self.bits // 8) + 4

    @property
    def unit(self) -> Tensor:
        return self.norms / (2 ** (self.bits - 1) - 1)

    def encode(self, values_K: Tensor) -> Tensor:
        """Entries ``[K, *shape]`` as bits, uint8 ``[K, ⌈d·bits/8⌉]``."""
        flat = values_K.reshape(len(values_K), -1).double()
        level = (flat / self.unit.to(flat).unsqueeze(1)).nan_to_num(0.0).round().to(torch.int64)
        shifted = (level + 2 ** (self.bits - 1) - 1).cpu().numpy()
        ones = (shifted[..., None] >> np.arange(self.bits)) & 1
        return torch.from_numpy(np.packbits(ones.astype(np.uint8).reshape(len(flat), -1), axis=1))

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """The inverse, in the shape and type of one client's tensor."""
        ones = np.unpackbits(sent.numpy(), axis=1, count=like.numel() * self.bits).reshape(len(sent), -1, self.bits)
        level = (ones.astype(np.int64) << np.arange(self.bits)).sum(-1) - (2 ** (self.bits - 1) - 1)
        values = torch.from_numpy(level).to(like.dtype) * self.unit.to(like.dtype).unsqueeze(1)
        return torch.stack([torch.empty_like(like).copy_(row.view(like.shape)) for row in values])


@dataclass
class Upload(Message):
    """What K clients send up.

    Attributes:
        clients: ids, ``[K]``.
        num_samples: size of their data sets, ``[K]``.
        num_steps: number of their local steps, ``[K]``.
        delta: updates ``w_k − w`` relative to what was broadcast, name → ``[K, *shape]``; hooks may rewrite them.
        finite: which clients sent finite numbers only, bool ``[K]`` on the device.
        round: of the download that it answers.
        loss: mean task loss of each client's local training, ``[K]`` on the device.
        num_seen: samples that they trained on, counted in every epoch, ``[K]``.
        extra: what they send beside Δ, by name; see :meth:`send`.
        levels: entries of Δ that travel in a few bits.
        notes: what measurements look at, by their name; not counted.
    """

    clients: np.ndarray
    num_samples: np.ndarray
    num_steps: np.ndarray
    delta: Params
    finite: Tensor
    round: int = 0
    loss: Tensor | None = None
    num_seen: np.ndarray | None = None
    extra: dict[str, Params] = field(default_factory=dict)
    levels: dict[str, Levels] = field(default_factory=dict)
    notes: dict[str, Params] = field(default_factory=dict)

    def send(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Sends more than Δ: ``tensors``, name → ``[K, *shape]``, which the server's part meets in ``on_receive``.

        That lists ``name`` in ``uploads``; of floats their mean becomes ``round.received[name]``, or what the run's
        aggregator makes of them. A client whose numbers are not all finite counts for nothing.
        """
        self.extra[name] = dict(tensors)

    @property
    def bytes_per_client(self) -> int:
        """Of one client's message."""
        whole = {name: t for name, t in self.delta.items() if name not in self.levels}
        sent = sum(map(nbytes, (whole, *self.extra.values()))) // len(self.clients)
        return sent + sum(own.nbytes(self.delta[name][0].numel()) for name, own in self.levels.items())


def finite_clients(tensors_K: Mapping[str, Tensor], narrow: Set[str] | None = None) -> Tensor:
    """Which clients sent finite numbers only, bool ``[K]``, without a wait for the device.

    With ``narrow`` (``Aggregator.narrow``): such as a sum takes, below 2¹¹ of tensors of these names, else below 2⁴¹.
    """
    kinds = [(2.0**11, True), (2.0**41, False)] if narrow is not None else [(torch.inf, False)]
    first = next(iter(tensors_K.values()))
    finite = [torch.ones(len(first), dtype=torch.bool, device=first.device)]
    for limit, is_narrow in kinds:
        those = [t for name, t in tensors_K.items() if (name in (narrow or ())) == is_narrow and t.numel()]
        if not those:
            continue
        ends = ends_together(those) if those[0].is_cuda else ends_by_row(those)
        finite.append((ends.abs() < limit).all(1))
    return torch.stack(finite).all(0)


def ends_by_row(tensors_K: Sequence[Tensor]) -> Tensor:
    """The smallest and the largest entry of each tensor, ``[K, 2 · tensors]``: on a CPU, where a call costs little."""
    rows = zip(*tensors_K, strict=True)
    return torch.stack([torch.stack([end.double() for t in row for end in torch.aminmax(t)]) for row in rows])


def ends_together(tensors_K: Sequence[Tensor]) -> Tensor:
    """The same, with two kernels a tensor, however many clients: on a GPU. On a CPU it takes seven times as long."""
    over = [(t, tuple(range(1, t.dim()))) for t in tensors_K]
    ends = [end for t, dims in over for end in ((t.amin(dims), t.amax(dims)) if dims else (t, t))]
    return torch.stack([end.double() for end in ends], 1)


def sendable(upload: Upload, narrow: Set[str] | None) -> Tensor:
    """Which of the clients sent what the server's sums take, beside Δ too, bool ``[K]``; ``narrow`` as above."""
    finite = finite_clients(upload.delta, narrow)
    for tensors in upload.extra.values():
        finite = finite & finite_clients(tensors, None if narrow is None else frozenset())
    return finite


def refuse_other(what: str, sent: Params, known: Params, *clients: int) -> None:
    """Raises MessageError, naming the first tensor that is missing, unknown or of another shape or type than is known
    here, of so many ``clients``.
    """
    for name, like in known.items():
        if name not in sent:
            raise MessageError(f"{what} lacks {name}: it is of another model or method.")
        if (shape := (*sent[name].shape,)) != (expected := (*clients, *like.shape)):
            raise MessageError(f"{what} has {name} as {shape}, and here it is {expected}.")
        if sent[name].dtype != like.dtype:
            raise MessageError(f"{what} has {name} in {sent[name].dtype}, and here it is in {like.dtype}.")
    if unknown := sorted(set(sent) - set(known)):
        raise MessageError(f"{what} has {unknown[0]}, which is not known here: it is of another model or method.")
