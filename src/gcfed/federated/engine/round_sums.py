"""What the server adds up in a round: on each process while uploads arrive, and over all processes
at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gcfed.federated.parts import ServerPart
from gcfed.federated.parts.part import Accumulator, Aggregator
from gcfed.federated.protocol.checks import are_finite
from gcfed.federated.protocol.messages import Expected, Params, Upload
from gcfed.federated.protocol.rounds import Received, Round
from gcfed.utils.device import on_device
from gcfed.utils.refusal import Refusal


class Counts(NamedTuple):
    """Numbers of a round over all its uploads; all of them are whole, except the losses' sum.

    Attributes:
        num_losses, loss_sum: number of finite losses of clients that count, and their sum.
        num_finite: number of clients that sent finite numbers only.
        samples, steps: of all uploads.
    """

    num_losses: float
    loss_sum: float
    num_finite: float
    samples: float
    steps: float

    @property
    def mean_loss(self) -> float:
        """NaN if no client that counts has a finite loss."""
        return self.loss_sum / self.num_losses if self.num_losses else float("nan")


@dataclass
class RoundSums:
    """The sums of this process in a round.

    Attributes:
        expected: the tensors that a client sends.
        means: of Δ ("delta"), and of the floats that clients send in addition to it, by name.
        part_sums: the sums of each part (``ServerPart.sums``).
        finite: which clients sent finite numbers only, a bool ``[K]`` on the device per upload.
        losses: the clients' losses, ``[K]`` on the device per upload.
        loss_table: float64 ``[2, K]``: the losses of those clients of this process that
            count, and 1 for each of them; 0 for all others. None unless cohorts depend on losses.
        samples, steps: as in :class:`Counts`.
    """

    expected: Expected
    means: Mapping[str, Accumulator]
    part_sums: dict[ServerPart, Params]
    finite: list[Tensor]
    losses: list[Tensor]
    loss_table: Tensor | None = None
    samples: int = 0
    steps: int = 0

    @classmethod
    def empty(
        cls,
        round: Round,
        *,
        expected: Expected,
        aggregator: Aggregator,
        parts: Sequence[ServerPart],
        depends_on_losses: bool,
    ) -> Self:
        """The sums without an upload."""
        means = {"delta": aggregator.new_sum(round)}
        for name, like in expected.shapes.items():
            is_float = all(t.is_floating_point() for t in like.values())
            if name != "delta" and is_float:
                means[name] = aggregator.new_extra_sum(round)
        return cls(
            expected=expected,
            means=means,
            part_sums={part: part.sums(round) for part in parts},
            finite=[round.zeros(0).bool()],  # a process may train no client
            losses=[round.zeros(0)],
            loss_table=round.zeros(2, len(round.cohort)) if depends_on_losses else None,
        )

    def add(self, upload: Upload, round: Round) -> None:
        """Adds up the means, losses, samples and steps of K uploads."""
        for name, mean in self.means.items():
            sent = upload if name == "delta" else replace(upload, delta=upload.extra[name])
            mean.add(sent)
        self.finite.append(upload.finite)
        self.losses.append(upload.loss)
        self.samples += sum(upload.num_seen.tolist())
        self.steps += sum(upload.num_steps.tolist())
        if self.loss_table is not None:
            self._add_losses(self.loss_table, upload, round)

    def _add_losses(self, table: Tensor, upload: Upload, round: Round) -> None:
        counts_K = upload.finite & upload.loss.isfinite()
        rows_K = on_device(round.rows(upload.clients), table.device)
        table[0, rows_K] = upload.loss.where(counts_K, 0.0).to(table)
        table[1, rows_K] = counts_K.to(table)

    def add_terms(self, part: ServerPart, terms: Params) -> None:
        """Adds the terms that a part's ``on_receive`` has returned.

        Raises Refusal for terms of other names or shapes than those of ``ServerPart.sums``.
        """
        for name, term in terms.items():
            total = self.part_sums[part].get(name)
            if total is None:
                raise Refusal(
                    f"{part.title}: on_receive() returns {name}, and sums() has no such name: let"
                    " sums() return zeros for it."
                )
            if term.shape != total.shape:
                raise Refusal(
                    f"{part.title}: on_receive() returns {name} of shape {[*term.shape]}, and"
                    f" sums() has shape {[*total.shape]}: let both return the same shape."
                )
            total.add_(term)

    def received(self, round: Round, answered: np.ndarray, *, needs_clients: bool) -> Received:
        """The round after its uploads, from the sums of all processes.

        Args:
            answered: ids of the clients that answered.
            needs_clients: whether the server steps only if a client counts.
        """
        shapes = self.expected.shapes
        means = {name: mean.reduce(shapes[name]) for name, mean in self.means.items()}
        tables = [] if self.loss_table is None else [self.loss_table]
        tensors, layout = tree_flatten((self._counts(), self.part_sums, tables))
        sums, part_sums, tables = tree_unflatten(round.reduce(tensors), layout)
        losses = _losses_by_client(tables[0], round) if tables else {}
        is_finite = are_finite(t for mean in means.values() for t in mean.values())
        # one transfer, because the host waits for the device
        *numbers, is_update_finite = torch.cat([sums, is_finite.view(1)]).tolist()
        counts = Counts(*numbers)
        has_step = counts.num_finite > 0 or not needs_clients
        return Received(
            **vars(round),
            answered=answered,
            update=means.pop("delta"),
            extra_means=means,
            sums=part_sums,
            num_finite=int(counts.num_finite),
            loss=counts.mean_loss,
            losses=losses,
            samples=int(counts.samples),
            steps=int(counts.steps),
            overflowed=not is_update_finite,
            usable=has_step and bool(is_update_finite),
        )

    def _counts(self) -> Tensor:
        """The :class:`Counts` of this process as a vector, float64 ``[5]`` on the device."""
        finite_K = torch.cat(self.finite)
        loss_K = torch.cat(self.losses)
        both_K = finite_K & loss_K.isfinite()
        of_clients = torch.stack([both_K, loss_K.where(both_K, 0.0), finite_K]).sum(1)
        of_uploads = np.array([self.samples, self.steps], dtype=np.float64)
        return torch.cat([of_clients, on_device(of_uploads, of_clients.device)])


def _losses_by_client(table: Tensor, round: Round) -> dict[int, float]:
    """The losses of the clients that count, from :attr:`RoundSums.loss_table` of all processes."""
    losses, counted = table.tolist()
    found: dict[int, float] = {}
    for client, loss, counts in zip(round.cohort.tolist(), losses, counted, strict=True):
        if counts:
            found[client] = loss
    return found
