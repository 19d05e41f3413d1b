"""What the measurements share: the rounds in which they look, and means over the cohort."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.method import ClientPart, Order, Part, ServerPart, Setup
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack
from gcfed.utils.number import number


class Metric(Part):
    """A part that only looks: with it or without it, a run is the same bit for bit.

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
        self.rounds = setup.rounds
        self.names = [name for name, _ in setup.module.net.named_parameters() if name in setup.module.travels]

    def due(self, index: int, clients: int = 1) -> bool:
        """Whether the round of this index is measured; one without clients is not."""
        return clients > 0 and ((index + 1) % self.every == 0 or index + 1 >= self.rounds)


class ServerMetric(Metric, ServerPart):
    """What the server measures, of uploads as they arrive and of its model."""

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.server_parts = [part for part in setup.parts if isinstance(part, ServerPart)]

    def due_in(self, round: Round) -> bool:
        return self.due(round.index, len(round.cohort))

    def as_sent(self, upload: Upload, names: Sequence[str]) -> Params:
        """The clients' updates as they were uploaded, name → ``[K, *shape]``.

        What travels in other coordinates counts as the update that it stands for.
        """
        sent = {name: upload.delta[name] for name in names}
        for part in self.server_parts:
            sent = {name: part.decode(name, t) for name, t in sent.items()}
        return sent


class ClientMetric(Metric, ClientPart):
    """Numbers that each client has of its own when its local training is over; columns are their means.

    The clients are looked at one after the other, in evaluation mode, so that the numbers do not depend on who else is
    in the stack. They travel in ``notes``.
    """

    columns: tuple[str, ...]
    """What :meth:`measure` returns; known from ``validate`` on."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return self, Means(self)

    def measure(self, stack: ClientStack, client: int, download: Download) -> Tensor:
        """The numbers of one client (its row in the stack), one for each of ``columns``, on the device."""
        raise NotImplementedError

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        if not self.due(download.round):
            return
        training, device = stack.net.training, next(iter(stack.full.values())).device
        started = now(device)
        stack.net.eval()
        try:
            with torch.no_grad():
                values_KV = torch.stack([self.measure(stack, i, download) for i in range(len(stack))])
        finally:
            stack.net.train(training)
        seconds = torch.tensor(now(device) - started, dtype=torch.float64)
        stack.notes[self.name] = {"values": values_KV, "seconds": seconds}


class Means(ServerMetric):
    """The means of what clients measured of themselves, in the row of metrics.

    A number that is not finite is left out of its mean, and a mean of nothing out of the row. What the measuring took
    is no time of training.
    """

    def __init__(self, client: ClientMetric) -> None:
        self.name = client.name
        super().__init__(client.every)
        self._client = client  # for its columns, which are known later

    @property
    def columns(self) -> tuple[str, ...]:
        return self._client.columns

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__} of {self.name}"  # there may be several

    def on_broadcast(self, download: Download, round: Round) -> None:
        self._values_KV = torch.zeros(
            len(round.cohort), len(self.columns), dtype=torch.float64, device=next(iter(download.model.values())).device
        )
        self._seconds = 0.0

    def on_receive(self, upload: Upload, round: Round) -> None:
        if note := upload.notes.get(self.name):
            self._values_KV[round.places(upload.clients)] = note["values"].to(self._values_KV)
            self._seconds += float(note["seconds"])

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if self.due_in(round):
            row["time/train_s"] -= self._seconds
            (values_KV,) = round.reduce([self._values_KV])  # each client is one process's, and zero in all others
            row |= self.summary(values_KV)

    def summary(self, values_KV: Tensor) -> dict[str, float]:
        """What of the cohort's numbers, ``[K, V]``, goes into the row."""
        finite = values_KV.isfinite()
        sums = torch.stack([values_KV.where(finite, 0.0).sum(0), finite.sum(0)]).tolist()
        return {name: total / count for name, total, count in zip(self.columns, *sums, strict=True) if count}


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
