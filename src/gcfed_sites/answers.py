"""The answers of sites, and checks of what they contain. A site may send anything.

Every number of an answer is bounded by what was asked: the length of its message, the names, types
and shapes of its tensors, the clients, their numbers of samples and steps, and their losses.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from gcfed.federated.protocol.messages import Expected, MessageError, Upload, nbytes
from gcfed.federated.protocol.packing import unpack
from gcfed.federated.protocol.uploads import read_upload, shortened
from gcfed.federated.state.store import NONE

RESUME = "The same command with ckpt_path=last continues after the last finished round."
LARGEST_LOSS = 1e20  # times a weight it is still finite in float32
About = dict[str, Any]
"""The plain values of a question or an answer."""


class Limits(NamedTuple):
    """The most bytes of a message: of its ``header``, which has everything but the tensors'
    numbers, and of its ``tensors``.
    """

    header: int
    tensors: int = 0

    def check(self, message: bytes) -> None:
        """Raises MessageError for a longer message. Nothing of it is decoded before."""
        header = int.from_bytes(message[:8], "little")
        tensors = len(message) - 8 - header
        if header > self.header or tensors > self.tensors:
            raise MessageError(
                f"a message of {len(message):,} bytes is too long: its header has {header:,} bytes"
                f" (at most {self.header:,}), its tensors {tensors:,} (at most {self.tensors:,})."
            )


class Answer(NamedTuple):
    """A site's answer to the question with this number: a message, or why the site is ``gone``."""

    site: str
    number: int
    message: bytes
    gone: str = ""

    def content(self, limits: Limits) -> About:
        """The content of the message.

        Raises MessageError if there is none, if it is too long, or if it says why the site cannot
        answer.
        """
        if self.gone:
            raise MessageError(self.gone)
        limits.check(self.message)
        content = unpack(self.message)
        if "failure" in content:
            raise MessageError(str(content["failure"]))
        return content


@contextmanager
def counted_against(site: str, failures: dict[str, str], failed: str = "failed") -> Iterator[None]:
    """Reads the answer of a site. Removes the site from ``failures``, or enters the error there."""
    try:
        yield
        del failures[site]
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        failures[site] = f"{failed}: {printable(why[:500])}"


def printable(text: str) -> str:
    """A site's words without characters that could control a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def require(right: bool, what: str, value: Any) -> None:
    """Raises MessageError for a value that a site may not send."""
    if not right:
        raise MessageError(f"{what} cannot be {shortened(value)}.")


def check_whole(what: str, numbers: Any, least: int, most: int) -> None:
    """Raises MessageError for anything but a list of whole numbers within these bounds."""
    require(isinstance(numbers, list), what, numbers)
    for number in numbers:
        require(type(number) is int and least <= number <= most, what, numbers)


def check_versions(states: Any, names: Iterable[str], clients: list[int], round_index: int) -> None:
    """Raises MessageError for anything but a version of each of these clients' states, by name of
    the state.
    """
    require(isinstance(states, dict) and states.keys() == {*names}, "states", states)
    for name, versions in states.items():
        check_whole(f"states.{name}", versions, NONE, round_index)
        require(len(versions) == len(clients), f"states.{name}", versions)


@dataclass(frozen=True)
class RoundTask:
    """What a site was asked to do in a round.

    Attributes:
        round: index of the round.
        clients: ids of its clients, ``[K]``, sorted.
        num_samples: of each client, ``[K]``, as the site reported them at the start.
        num_steps: the local steps of each client, ``[K]``, as planned.
        batch_size: most samples of a step.
        least_loss: the task's smallest loss.
        expected: the tensors of an upload.
    """

    round: int
    clients: ndarray
    num_samples: ndarray
    num_steps: ndarray
    batch_size: int
    least_loss: float
    expected: Expected

    @property
    def limits(self) -> Limits:
        """The longest answer: K uploads of one client each."""
        shapes = self.expected.shapes.values()
        notes = self.expected.notes.values()
        bytes_of_client = 1000  # finite, loss, and norms below
        length_of_names = 0
        for tensors in (*shapes, *notes):
            bytes_of_client += nbytes(tensors) + 4 * len(tensors)
            for name in tensors:
                # escaped twice in the header, with a shape, strides and a place
                length_of_names += 14 * len(name) + 1000
        k = len(self.clients)
        header = 1_000_000 + k * (10_000 + 2 * length_of_names)
        return Limits(header, k * bytes_of_client)


def checked_uploads(contents: Any, asked: RoundTask) -> list[Upload]:
    """The uploads of all clients that were asked.

    Raises an exception of any type, which names what is wrong, if anything else was sent.
    """
    require(isinstance(contents, list) and len(contents) <= len(asked.clients), "uploads", contents)
    uploads = []
    for content in contents:
        require(isinstance(content, dict), "an upload", content)
        uploads.append(checked_upload(content, asked))
    ids = sorted(client for upload in uploads for client in upload.clients.tolist())
    wanted = asked.clients.tolist()
    require(ids == wanted, "clients", f"{ids}, because the server asked for {wanted}")
    return uploads


def checked_upload(content: Mapping[str, Any], asked: RoundTask) -> Upload:
    """The upload of some of the clients that were asked.

    Raises an exception of any type, which names what is wrong, if anything else was sent.
    """
    upload = read_upload(content, asked.expected)
    require(upload.round_index == asked.round, "round", upload.round_index)
    known = np.isin(upload.clients, asked.clients)
    require(bool(known.all()), "clients", upload.clients)
    rows = np.searchsorted(asked.clients, upload.clients)
    samples_K = asked.num_samples[rows]
    steps_K = asked.num_steps[rows]
    require(np.array_equal(upload.num_samples, samples_K), "num_samples", upload.num_samples)
    require(np.array_equal(upload.num_steps, steps_K), "num_steps", upload.num_steps)
    # in floats, because the product may not be an int64
    most_K = steps_K * float(asked.batch_size)
    possible_K = (steps_K <= upload.num_seen) & (upload.num_seen <= most_K)
    require(bool(possible_K.all()), "num_seen", upload.num_seen)
    _check_losses(upload.loss, asked.least_loss)
    return upload


def _check_losses(loss_K: torch.Tensor, least: float) -> None:
    """Raises MessageError for a loss that the task cannot have.

    A loss that is not finite is that of a client that diverged. No sum contains it.
    """
    possible_K = (loss_K >= least) & (loss_K.abs() <= LARGEST_LOSS)
    right = bool((possible_K | ~loss_K.isfinite()).all())
    require(right, "loss", loss_K.tolist())
