"""What the measurements share: the rounds in which they look, and means over the cohort."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.aggregate import Upload
from gcfed.federated.method import FederatedMethod, Setup
from gcfed.federated.round import Order, Round
from gcfed.federated.stack import ClientStack, Params
from gcfed.utils.number import number


class Metric(FederatedMethod):
    """A method that only looks: with it or without it, a run is the same bit for bit.

    Args:
        every: rounds between two measurements; the last round is always measured, as it is always tested.

    Raises:
        ValueError: ``every`` is not a whole number of at least 1.
    """

    order = Order.MEASURES
    name: str
    """Its key under ``metrics`` and the first part of its columns."""

    def __init__(self, every: int = 1) -> None:
        self.every = number(f"metrics.{self.name}.every", every, 1, whole=True)

    def validate(self, setup: Setup) -> None:
        self.rounds, self.methods = setup.rounds, setup.methods
        self.names = [name for name, _ in setup.module.net.named_parameters()]

    def as_sent(self, upload: Upload, names: Sequence[str]) -> Params:
        """The clients' updates as they were uploaded, name → ``[K, *shape]``, after ``on_upload`` of the methods.

        What travels in other coordinates counts as the update that it stands for.
        """
        sent = {name: upload.delta[name] for name in names}
        for method in self.methods:
            sent = {name: method.decode(name, t) for name, t in sent.items()}
        return sent

    def due(self, round: Round) -> bool:
        """Whether this round is measured; a round without clients and another's rehearsal are not."""
        number = round.index + 1
        return len(round.cohort) > 0 and not round.rehearsal and (number % self.every == 0 or number >= self.rounds)


class ClientMetric(Metric):
    """Numbers that each client has of its own when its local training is over; columns are their means.

    The clients are looked at one after the other, in evaluation mode, so that the numbers do not depend on who else is
    in the stack. A number that is not finite is left out of its mean, and a mean of nothing out of the row. What it
    takes is no time of training.
    """

    columns: tuple[str, ...]
    """What :meth:`measure` returns; known from ``validate`` on."""

    def measure(self, stack: ClientStack, client: int, round: Round) -> Tensor:
        """The numbers of one client (its row in the stack), one for each of ``columns``, on the device."""
        raise NotImplementedError

    def on_broadcast(self, round: Round) -> None:
        if self.due(round):
            device = next(iter(round.start.values())).device
            self._sums = torch.zeros(2, len(self.columns), dtype=torch.float64, device=device)  # values, their number
            self._seconds = 0.0

    def on_clients_end(self, stack: ClientStack, round: Round) -> None:
        if self.due(round):
            values_KV = self.measured(stack, round)
            finite = values_KV.isfinite()
            self._sums += torch.stack([values_KV.where(finite, 0.0).sum(0), finite.sum(0)])

    def measured(self, stack: ClientStack, round: Round) -> Tensor:
        """The numbers of all clients of the stack, ``[K, V]``."""
        training, device = stack.net.training, next(iter(stack.full.values())).device
        started = now(device)
        stack.net.eval()
        try:
            with torch.no_grad():
                return torch.stack([self.measure(stack, i, round) for i in range(len(stack))])
        finally:
            stack.net.train(training)
            self._seconds += now(device) - started

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if self.due(round):
            row["time/train_s"] -= self._seconds
            (sums,) = round.reduce([self._sums])
            row |= {
                name: total / count for name, total, count in zip(self.columns, *sums.tolist(), strict=True) if count
            }


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def client_state(stack: ClientStack, client: int) -> Params:
    """One client's network as its training left it, name → ``[*shape]``; views."""
    return {name: t[client] for name, t in stack.full.items()}


def dot(a: Params, b: Params) -> Tensor:
    """⟨a, b⟩ over all tensors of ``a``, in float64."""
    return torch.stack([(t * b[name]).sum(dtype=torch.float64) for name, t in a.items()]).sum()
