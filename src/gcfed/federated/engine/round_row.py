"""The round's row of metrics, and its columns that do not come from its test or from parts."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from gcfed.federated.parts import ServerPart
from gcfed.federated.parts.transport import Outcome
from gcfed.federated.protocol.messages import Download, Expected, nbytes
from gcfed.federated.protocol.rounds import Received
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.schedule import Participation, Schedule, Turn
from gcfed.utils.refusal import Refusal

NO_FAULTS = Faults()
#: The columns of every run, besides those of its test and of its parts.
COLUMNS_OF_EVERY_RUN = (
    "round",
    "train/loss",
    "train/clients",
    "train/nonfinite_clients",
    "train/refused_steps",
    "train/samples",
    "train/steps",
    "comm/down_bytes",
    "comm/up_bytes",
    "time/train_s",
    "time/round_s",
)


def columns_of_run(
    sampler: Participation, faults: Faults, clock: Clock, *, remote: bool
) -> list[str]:
    """The columns of what can happen in a run, without columns of the test and of methods.

    Args:
        remote: whether clients run on other machines.
    """
    columns = [*COLUMNS_OF_EVERY_RUN]
    is_late = sampler.timetable.late
    has_faults = faults != NO_FAULTS
    if has_faults or remote:
        columns.append("train/dropped_clients")
    if has_faults:
        columns.append("train/stragglers")
    if is_late or clock.step is not None:
        columns.append("clock/seconds")
    if is_late:
        columns += ["late/mean", "late/max", "late/lost"]
    return columns


def columns_of_training(received: Received, is_step_finite: bool) -> dict[str, Any]:
    """What the clients have done, and whether it counts."""
    row: dict[str, Any] = {"round": received.index + 1}
    answered = len(received.answered)
    if answered:
        row["train/loss"] = received.loss
    row["train/clients"] = answered
    row["train/nonfinite_clients"] = answered - received.num_finite
    row["train/refused_steps"] = int(received.overflowed) + int(not is_step_finite)
    row["train/samples"] = received.samples
    row["train/steps"] = received.steps
    return row


def columns_of_bytes(
    received: Received, download: Download, expected: Expected, turn: Turn, outcome: Outcome
) -> dict[str, Any]:
    """The bytes of all messages, also of uploads that came too late to be used."""
    num_downloads = turn.num_asked - outcome.num_unsent
    reply = sum(nbytes(tensors) for tensors in received.reply.values())
    num_uploads = len(received.answered) + turn.num_too_late
    return {
        "comm/down_bytes": num_downloads * download.nbytes + len(received.answered) * reply,
        "comm/up_bytes": num_uploads * expected.nbytes,
    }


def columns_of_clients(
    received: Received, turn: Turn, columns: Sequence[str], schedule: Schedule
) -> dict[str, Any]:
    """Clients that dropped out, did fewer steps or are late, and the time, as far as the run has
    these columns.
    """
    row: dict[str, Any] = {}
    if "train/dropped_clients" in columns:
        unanswered = len(received.cohort) - len(received.answered)
        row["train/dropped_clients"] = turn.num_lost + unanswered
    if "train/stragglers" in columns:
        row["train/stragglers"] = _count_stragglers(received, schedule)
    if "clock/seconds" in columns:
        row["clock/seconds"] = turn.seconds
    if "late/lost" in columns:
        staleness_K = received.index - received.versions
        if len(staleness_K):
            row["late/mean"] = float(staleness_K.mean())
            row["late/max"] = int(staleness_K.max())
        row["late/lost"] = turn.num_lost
    return row


def _count_stragglers(received: Received, schedule: Schedule) -> int:
    """Number of clients that answered and did fewer local steps than planned."""
    stragglers = 0
    for version, clients in received.by_version():
        answered = np.intersect1d(clients, received.answered)
        planned = schedule.planned(answered)
        done = schedule.steps(answered, version)
        stragglers += int((done < planned).sum())
    return stragglers


def refuse_changes(part: ServerPart, before: dict[str, Any], row: dict[str, Any]) -> None:
    """Raises Refusal if a part has removed a column of the row, or given it a second value."""
    for name, value in before.items():
        if name not in row:
            raise Refusal(f"{part.title} removes the column {name}, which is not its own.")
        # Measurements subtract their time from that of training.
        if row[name] is not value and name != "time/train_s":
            raise Refusal(
                f"{part.title} writes the column {name}, which the row already has. Rename it."
            )


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The row with tensors as numbers. Raises Refusal for anything else."""
    plain = {}
    for name, value in row.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, Real):
            raise Refusal(
                f"column {name}: a row of metrics takes numbers, and a part has given it {value!r}."
            )
        plain[name] = value
    return plain
