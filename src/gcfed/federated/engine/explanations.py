"""Explains which uploads do not count or are refused, and what helps."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch

from gcfed.federated.parallel.sums import sum_over_processes
from gcfed.federated.parts import ClientPart, Setup
from gcfed.federated.protocol.checks import too_large
from gcfed.federated.protocol.messages import Expected, Upload

log = logging.getLogger(__name__)
SCALE = "scale the inputs"
LOWER = "lower client.optimizer.lr or set client.clip_norm"


@dataclass(frozen=True)
class Explanations:
    """Warns of clients that do not count, and explains uploads that are refused.

    Attributes:
        given: the advice that this process has given. Tensors are named once for each advice.
    """

    setup: Setup
    given: set[str] = field(default_factory=set)

    def explain(self, upload: Upload) -> None:
        """Names the tensors of K uploads whose numbers are too large for a sum."""
        limit = self.setup.aggregator.limit
        tensors: dict[str, list[str]] = {SCALE: [], LOWER: []}
        for name, largest in too_large(upload, limit).items():
            advice = SCALE if self._is_statistic(name) else LOWER
            tensors[advice].append(f"{name} (up to {largest:.2g})")
        for advice, names in tensors.items():
            if names and advice not in self.given:
                self.given.add(advice)
                log.warning(
                    "clients send too large numbers in %s; a sum takes numbers below %.2g: %s.",
                    shorten(", ".join(names), 200, placeholder=" …"),
                    limit,
                    advice,
                )

    def undeclared(self, upload: Upload, expected: Expected) -> str:
        """The end of an error's sentence. It names what was sent without being listed, and the
        parts that may have sent it.
        """
        names = [name for name in upload.extra if name not in expected.shapes]
        if not names:
            return ""
        senders = []
        for part in self.setup.parts:
            if isinstance(part, ClientPart) and part.overrides("send"):
                senders.append(type(part).__name__)
        by = f", and {' or '.join(senders)} sends it in send()" if senders else ""
        return (
            f" No method lists {', '.join(names)}{by}: list it in the method's uploads(), or do not"
            " send it."
        )

    def _is_statistic(self, name: str) -> bool:
        """Whether the tensor is a buffer, such as a running variance, which no rate scales."""
        module = self.setup.module
        return name in module.travels and name not in self.setup.names

    def _advice(self) -> str:
        """The end of the warning about clients that do not count: what helps.

        It depends on what all processes have explained. Nothing is explained on a GPU, or if
        only NaN was sent.
        """
        given = [SCALE in self.given, LOWER in self.given]
        own = torch.tensor(given, dtype=torch.int64, device=self.setup.module.device)
        (counts,) = sum_over_processes([own])
        scale, lower = counts.tolist()
        if lower:
            return f" {LOWER.capitalize()}."
        if scale:
            return ""
        return f" {SCALE.capitalize()} if their numbers are large; otherwise {LOWER}."

    def warn_of_row(self, row: dict[str, Any]) -> None:
        """Warns of clients that do not count in a round, and of a step that was undone.

        Every process calls it, with the same row. The first one warns.
        """
        lost = row["train/nonfinite_clients"]
        advice = self._advice() if lost else ""
        if not self.setup.module.trainer.is_global_zero:
            return
        stays = "the model stays as it was"
        if lost:
            log.warning(
                "round %d: %d of %d clients sent numbers that are not finite, or too large for a"
                " sum; %s.%s",
                row["round"],
                lost,
                row["train/clients"],
                stays if lost == row["train/clients"] else "they are left out",
                advice,
            )
        if row["train/refused_steps"]:
            log.warning(
                "round %d: the mean update or the server's step was not finite; %s.",
                row["round"],
                stays,
            )
