"""Base classes of the measurements. They say in which rounds to measure, what clients send, and
how to take means over the cohort.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from numpy import ndarray
from torch import Tensor

from gcfed.federated.network.stack import ClientStack
from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.parts import (
    ClientPart,
    Download,
    Order,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
)
from gcfed.folders.rows import RoundRows
from gcfed.folders.showing import show_picture
from gcfed.models.unchanged import evaluating
from gcfed.utils.checked import Count, checked
from gcfed.utils.device import device_of
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)
AT_ONCE = 500  # samples per forward pass


class ServerMetric(ServerPart):
    """A part that only measures, in the rounds that are due. It does not change one bit of the run.

    The engine calls the hooks in the order in which this class defines them. The time of ``begin``
    and the time in the sum ``"seconds"`` do not count as training time.

    Args:
        every: rounds between two measurements. The last round is always measured, unless a callback
            such as early stopping ends the run before it, or no client answers in it. A warning
            then says so: one more round would change the run.

    Attributes:
        needs_clients: whether it measures clients, so that a round in which no client answers has
            nothing to measure. If not, it measures the global model alone.
    """

    order = Order.MEASURES
    needs_clients: ClassVar[bool] = True

    @checked
    def __init__(self, every: Count = 1) -> None:
        self.every = every

    def bind(self, setup: Setup) -> None:
        self.rounds = setup.rounds
        self.unanswered = 0  # the last round that had to be measured, and in which nobody answered
        self.data = setup.data
        kept = setup.no_steps
        self.names = [name for name in setup.names if name not in kept]
        self.module = setup.module
        self.transport = setup.transport
        self.server_parts = [part for part in setup.parts if isinstance(part, ServerPart)]

    def begin(self, download: Download, round: Round) -> None:
        """Called after the methods, when the download is final."""

    def zeros(self, round: Round) -> Params:
        """The metric's sums at the start of a round, all 0: name → tensor. Shapes are the same on
        every process.
        """
        return {}

    def take(self, upload: Upload, round: Round) -> Params | None:
        """Returns the terms of these K clients."""
        return None

    def columns(self, round: Received) -> dict[str, float]:
        """The metric's columns in the row of metrics. ``round.sums[self]`` holds its sums over the
        cohort.
        """
        return {}

    def due_in(self, round: Round) -> bool:
        has_enough = len(round.cohort) > 0 or not self.needs_clients
        return has_enough and self.due(round.index)

    def due(self, index: int) -> bool:
        return (index + 1) % self.every == 0 or index + 1 >= self.rounds

    def on_broadcast(self, download: Download, round: Round) -> None:
        self.seconds = 0.0
        # Without a ``begin``, there is nothing for the clock to wait for.
        if not self.due_in(round) or type(self).begin is ServerMetric.begin:
            return
        device = device_of(download.broadcast_model)
        started = now(device)
        self.begin(download, round)
        self.seconds = now(device) - started

    def sums(self, round: Round) -> Params:
        return self.zeros(round) if self.due_in(round) else {}

    @torch.no_grad()
    def on_receive(self, upload: Upload, round: Round) -> Params | None:
        return self.take(upload, round) if self.due_in(round) else None

    @torch.no_grad()
    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        if not self.due(round.index):
            return
        if self.needs_clients and len(round.answered) == 0:
            self.unanswered = round.index + 1
            return
        row |= self.columns(round)
        if not self.transport.remote:  # sites have their own clocks and measure in parallel
            _, num_processes = rank_and_world()
            self.seconds += float(round.sums[self].get("seconds", 0.0)) / num_processes
        row["time/train_s"] -= self.seconds

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rounds = trainer.global_step
        if rounds and not self.due(rounds - 1):
            last = rounds - rounds % self.every
            log.warning(
                "metrics: %s did not measure round %d, with which the run has ended early. %s. Set"
                " its every to 1",
                self.title,
                rounds,
                f"Its last values are those of round {last}" if last else "It has no values",
            )
        elif rounds and rounds == self.unanswered:
            log.warning(
                "metrics: %s did not measure round %d, the last one, in which no client answered",
                self.title,
                rounds,
            )

    def params(self, start: Params) -> Params:
        """The parameters of a model, except for those that clients keep (FedPer, FedBN)."""
        return {name: start[name] for name in self.names}

    def as_sent(self, upload: Upload, names: Sequence[str]) -> Params:
        """The clients' updates as they were uploaded, lifted from any subspace, name → ``[K,
        *shape]``.
        """
        sent = {name: upload.delta[name] for name in names}
        for part in self.server_parts:
            sent = {name: part.decode(name, t) for name, t in sent.items()}
        return sent

    def show(self, picture: Path, round: Round) -> None:
        """Gives a PNG file to the loggers that accept pictures. Its title there is the file's name
        up to the first ``_``.
        """
        show_picture(self.module.trainer.loggers, picture, round.index + 1)


class ClientMetric(ServerMetric, ClientPart):
    """Measures on the clients after their local training. The server adds up their notes.

    A metric of your own needs :meth:`note`, :meth:`zeros` and :meth:`columns`, or is one of
    :class:`OwnNumbers`.
    """

    def note(self, stack: ClientStack, download: Download) -> Params:
        """The sums over the K clients of a stack, like ``zeros``.

        Runs on the clients, with its arguments only.
        """
        raise NotImplementedError

    @torch.no_grad()
    def observe(self, stack: ClientStack, download: Download) -> Params | None:
        index = download.round_index if download.used is None else download.used
        return self.note(stack, download) if self.due(index) else None

    def notes(self, round: Round) -> dict[str, Params]:
        sums = self.sums(round)
        if not sums:
            return {}
        return {self.title: {name: t.to("meta") for name, t in sums.items()}}

    def take(self, upload: Upload, round: Round) -> Params | None:
        return upload.notes[self.title]


class OwnNumbers(ClientMetric):
    """Numbers of each single client; the columns are their means over the cohort.

    Clients are measured one by one, in evaluation mode, so that a number does not depend on the
    stack. The mean leaves out numbers that are not finite; if all are, there is no column. A
    subclass needs ``numbers`` and :meth:`measure`.
    """

    numbers: tuple[str, ...]
    """The columns, one for each number of ``measure``; known from ``bind`` on."""

    @property
    def writes(self) -> Sequence[str] | None:  # type: ignore[override]
        return getattr(self, "numbers", None)

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        """The values of ``numbers``, float64 on the device, ``[V]``, for the client in this row of
        the stack.

        ``own`` is its model after training, ``stack.broadcast_model`` its model before.
        """
        raise NotImplementedError

    def zeros(self, round: Round) -> Params:
        return {
            "values": round.zeros(len(round.cohort), len(self.numbers)),
            "seconds": round.zeros(),
        }

    def on_download(self, download: Download) -> None:
        self._first = True

    def compare(self, stack: ClientStack, download: Download) -> None:
        """Called once a round before the first client is measured, to prepare what clients are
        compared with.
        """

    def note(self, stack: ClientStack, download: Download) -> Params:
        device = device_of(stack.full)
        started = now(device)
        shape = (len(download.cohort), len(self.numbers))
        table = torch.zeros(shape, dtype=torch.float64, device=device)
        with evaluating(stack.net):
            if self._first:
                self.compare(stack, download)
            self._first = False
            for row, place in enumerate(np.searchsorted(download.cohort, stack.clients)):
                own = {name: t[row] for name, t in stack.full.items()}
                values = self.measure(stack, row, own, download)
                self._check_shape(values)
                table[place] = values
        seconds = now(device) - started
        return {"values": table, "seconds": torch.tensor(seconds, dtype=torch.float64)}

    def _check_shape(self, values: Tensor) -> None:
        """Raises Refusal for another shape than ``[V]``, which would be broadcast."""
        if values.shape != (len(self.numbers),):
            raise Refusal(
                f"{self.title}.measure returns a tensor of shape {[*values.shape]}, not"
                f" [{len(self.numbers)}], for {', '.join(self.numbers)}."
            )

    def take(self, upload: Upload, round: Round) -> Params | None:
        note = upload.notes[self.title]
        if not self.transport.remote:
            return note
        # A site could fill the rows of other sites' clients.
        rows = round.rows(upload.clients)
        values = torch.zeros_like(note["values"])
        values[rows] = note["values"][rows]
        return note | {"values": values}

    def values(self, round: Received) -> Tensor:
        """The values of the clients that answered, ``[K, V]``."""
        return round.sums[self]["values"][round.rows(round.answered)]

    def columns(self, round: Received) -> dict[str, float]:
        values_KV = self.values(round)
        finite = values_KV.isfinite()
        sums_V = values_KV.where(finite, 0.0).sum(0)
        sums, counts = torch.stack([sums_V, finite.sum(0)]).tolist()  # in one transfer
        means = {}
        for name, total, count in zip(self.numbers, sums, counts, strict=True):
            if count:
                means[name] = total / count
        return means


@checked
@dataclass(eq=False)
class RoundTable(ServerMetric):
    """Writes a metric's lines of each round to ``<name>.csv``; a resumed run drops lines after its
    checkpoint.
    """

    folder: str
    every: Count = 1

    name: ClassVar[str]
    header: ClassVar[tuple[str, ...]]  # columns after ``round``

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self._rows: RoundRows | None = None  # of this run, from its first lines on

    def append(self, round: Round, lines: Iterable[Iterable[Any]]) -> None:
        """Adds the lines of a round, given without the round's number."""
        rank, _ = rank_and_world()
        if rank != 0:
            return
        number = round.index + 1
        columns = ("round", *self.header)
        if self._rows is None:
            path = Path(self.folder) / f"{self.name}.csv"
            self._rows = RoundRows(path, number - 1, self.header)
        rows = [dict(zip(columns, (number, *line), strict=True)) for line in lines]
        self._rows.append(rows)


def now(device: torch.device) -> float:
    """Seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def drawn(samples: ndarray, most: int | None, rng: np.random.Generator) -> ndarray:
    """At most ``most`` of these samples, drawn at random, in their order; None: all."""
    if most is None or len(samples) <= most:
        return samples
    return np.sort(rng.choice(samples, most, replace=False))


def fetch_tests(data: Any, samples: ndarray) -> tuple[Tensor, Tensor]:
    """These samples of the test split."""
    inputs = []
    labels = []
    for i in samples.tolist():
        x, y = data.fetch_test((i, i + 1))
        inputs.append(x)
        labels.append(y)
    return torch.cat(inputs), torch.cat(labels)


def floats(values: Params) -> dict[str, float]:
    """Numbers on the device, fetched in one transfer."""
    return dict(zip(values, torch.stack([*values.values()]).tolist(), strict=True))


def dot(a: Params, b: Params) -> Tensor:
    """⟨a, b⟩ over all tensors of ``a``, in float64."""
    products = [(t * b[name]).sum(dtype=torch.float64) for name, t in a.items()]
    return torch.stack(products).sum()
