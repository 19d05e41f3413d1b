"""Hostile clients.

A run draws them once. What they send replaces everything that an honest client would send.

``sign_flip`` and ``scale`` multiply their messages (sign flip: Li et al., RSA, AAAI 2019, Section
5, with factor −4). ``gaussian`` sends noise (Blanchard et al., NeurIPS 2017, Section 6).
``label_flip`` trains on wrong labels, C − 1 − y instead of y (Fang et al., USENIX Security 2020,
Section 4). An attack edits the finished upload, in the coordinates in which it is sent.
Quantization comes after it.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from numpy import ndarray
from pydantic import Field
from torch import Tensor

from gcfed.federated.parts import (
    ClientPart,
    ClientStates,
    Download,
    Order,
    Received,
    ServerPart,
    Setup,
    Upload,
)
from gcfed.methods.requirements import class_logits
from gcfed.utils.checked import Share, Weight, checked
from gcfed.utils.rng import generator, torch_seed

log = logging.getLogger(__name__)


@checked
@dataclass(eq=False)
class Attack(ClientPart, ServerPart):
    """A share of all clients, rounded to a number, sends something else."""

    order = Order.ATTACKS
    writes = ("train/hostile_clients",)
    clients: Share = 0.2

    def validate(self, setup: Setup) -> None:
        num_clients = setup.data.num_clients
        if self.clients and not len(hostile(self.clients, num_clients, 0)):
            log.warning(
                "attack.clients=%s of %d clients is nobody: raise it.",
                self.clients,
                num_clients,
            )

    def bind(self, setup: Setup) -> None:
        self.num_clients = setup.data.num_clients

    def is_hostile(self, clients: ndarray, seed: int) -> ndarray:
        """Which of these clients, ``[K]``, are hostile."""
        return np.isin(clients, hostile(self.clients, self.num_clients, seed))

    def craft(self, sent: list[Tensor], client: int, download: Download) -> None:
        """Edits the messages of one hostile client in place."""

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        for row in np.flatnonzero(self.is_hostile(upload.clients, download.seed)).tolist():
            self.craft([t[row] for t in messages(upload)], int(upload.clients[row]), download)

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        """Counts the hostile clients that answered, ``train/hostile_clients``.

        A real server could not do this.
        """
        row["train/hostile_clients"] = int(self.is_hostile(round.answered, round.seed).sum())


@lru_cache(maxsize=8)
def hostile(share: float, num_clients: int, seed: int) -> ndarray:
    """Ids of a run's hostile clients, ascending. Each upload needs them, so they are cached."""
    count = int(share * num_clients + 0.5)
    ids = np.sort(generator(seed, "hostile").choice(num_clients, count, replace=False))
    ids.flags.writeable = False
    return ids


def messages(upload: Upload) -> list[Tensor]:
    """All floating-point tensors that clients send, ``[K, *shape]``: Δ and the
    messages of methods.
    """
    tensors_sent = []
    for tensors in (upload.delta, *upload.extra.values()):
        tensors_sent += [t for t in tensors.values() if t.is_floating_point()]
    return tensors_sent


@checked
@dataclass(eq=False)
class Scale(Attack):
    """Hostile clients multiply what they send: by −4 in the sign-flip attack, by 10¹⁰ for a broken
    client.
    """

    factor: Annotated[float, Field(ge=-1e30, le=1e30)] = 10.0

    def craft(self, sent: list[Tensor], client: int, download: Download) -> None:
        torch._foreach_mul_(sent, self.factor)


@checked
@dataclass(eq=False)
class Gaussian(Attack):
    """Hostile clients send normal noise instead of each tensor, ``factor`` times as large (root
    mean square).
    """

    factor: Weight = 10.0

    def craft(self, sent: list[Tensor], client: int, download: Download) -> None:
        random = torch.Generator(sent[0].device)
        random.manual_seed(torch_seed(download.seed, "attack", download.round_index, client))
        for t in sent:
            size = t.square().mean().sqrt() * self.factor
            t.copy_(torch.randn(t.shape, generator=random, device=t.device, dtype=t.dtype) * size)


class LabelFlip(Attack):
    """Hostile clients train honestly on labels C − 1 − y."""

    needs = [class_logits]

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self.data = setup.data
        self._labels: ndarray | None = None  # of all clients, after the attack

    def on_download(self, download: Download) -> None:
        if self.data.labels is self._labels:
            return
        last = self.data.num_classes - 1
        ids = hostile(self.clients, self.num_clients, download.seed)
        self.data.relabel(ids, lambda y: np.where(y >= 0, last - y, y))
        self._labels = self.data.labels
