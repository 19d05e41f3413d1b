"""Hostile clients: who they are is drawn once a run, what they send replaces all that an honest client would.

``sign_flip`` and ``scale`` multiply their messages (sign flip: Li et al., RSA, AAAI 2019, Section 5, with factor −4),
``gaussian`` sends noise (Blanchard et al., NeurIPS 2017, Section 5), ``label_flip`` trains on wrong labels, C − 1 − y
in place of y (Fang et al., USENIX Security 2020, Section 5). An attack sees uploads as they are ready to be sent, in
the coordinates in which they travel; hostile clients quantize, too, where all do.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.aggregate import Upload
from gcfed.federated.method import FederatedMethod, Setup
from gcfed.federated.round import Order, Round
from gcfed.utils.number import number
from gcfed.utils.rng import generator, torch_seed


class Attack(FederatedMethod):
    """Lets some clients send something else; ``train/hostile_clients`` counts them in each round's cohort.

    Args:
        clients: share of all clients that are hostile; their number is rounded.
    """

    order = Order.ATTACKS

    def __init__(self, clients: float = 0.2) -> None:
        self.clients = number("attack.clients", clients, 0, 1)

    def hostile(self, round: Round) -> np.ndarray:
        """Ids of the run's hostile clients, ascending."""
        count = int(self.clients * round.num_clients + 0.5)
        return np.sort(generator(round.seed, "hostile").choice(round.num_clients, count, replace=False))

    def craft(self, sent: list[Tensor], client: int, round: Round) -> None:
        """Edits one client's tensors in place."""

    def on_upload(self, upload: Upload, round: Round) -> None:
        for row in np.flatnonzero(np.isin(upload.clients, self.hostile(round))).tolist():
            self.craft([t[row] for t in messages(upload)], int(upload.clients[row]), round)

    def on_round_end(self, row: dict, round: Round) -> None:
        row["train/hostile_clients"] = int(np.isin(round.cohort, self.hostile(round)).sum())


def messages(upload: Upload) -> Sequence[Tensor]:
    """All tensors ``[K, *shape]`` that clients send: Δ and what goes beside it."""
    return [t for tensors in (upload.delta, *upload.extra.values()) for t in tensors.values()]


class Scale(Attack):
    """Hostile clients multiply what they send.

    Args:
        factor: −4 is the sign-flip attack, 10¹⁰ a broken client.
    """

    def __init__(self, clients: float = 0.2, *, factor: float = 10.0) -> None:
        super().__init__(clients)
        self.factor = number("attack.factor", factor, -1e30, 1e30)

    def craft(self, sent: list[Tensor], client: int, round: Round) -> None:
        torch._foreach_mul_(sent, self.factor)


class Gaussian(Attack):
    """Hostile clients send normal noise in place of every tensor.

    Args:
        factor: the noise's standard deviation, in units of the root mean square of the tensor that it replaces.
    """

    def __init__(self, clients: float = 0.2, *, factor: float = 10.0) -> None:
        super().__init__(clients)
        self.factor = number("attack.factor", factor, 0)

    def craft(self, sent: list[Tensor], client: int, round: Round) -> None:
        random = torch.Generator(sent[0].device)
        random.manual_seed(torch_seed(round.seed, "attack", round.index, client))
        for t in sent:
            size = t.square().mean().sqrt() * self.factor
            t.copy_(torch.randn(t.shape, generator=random, device=t.device, dtype=t.dtype) * size)


class LabelFlip(Attack):
    """Hostile clients train honestly on labels C − 1 − y."""

    needs_classes = True
    _flipped = False

    def validate(self, setup: Setup) -> None:
        self.data = setup.data

    def on_broadcast(self, round: Round) -> None:
        if not self._flipped:
            last = self.data.num_classes - 1
            self.data.relabel(self.hostile(round), lambda y: np.where(y >= 0, last - y, y))
            self._flipped = True

    def on_upload(self, upload: Upload, round: Round) -> None: ...
