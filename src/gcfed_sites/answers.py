"""The answers of sites, and checks of what they contain. A site may send anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch

from gcfed.federated.engine.wire import read_upload, unpack
from gcfed.federated.protocol.checks import refuse_misfit, refuse_other
from gcfed.federated.protocol.messages import Expected, MessageError, Upload
from gcfed.federated.state.store import NONE
from gcfed.federated.training.solver import LocalSolver

RESUME = "The same command with ckpt_path=last continues after the last finished round."
MOST = 1e20  # of a loss: times a weight it is still finite in float32
About = dict[str, Any]
"""The plain values of a question or an answer."""


class Answer(NamedTuple):
    """A site's answer to the question with this number: a message, or why the site is ``gone``."""

    site: str
    number: int
    message: bytes
    gone: str = ""

    @property
    def content(self) -> About:
        """The content of the message.

        Raises:
            MessageError: there is none, or it says why the site cannot answer.
        """
        if self.gone:
            raise MessageError(self.gone)
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
        # the site's words
        failures[site] = f"{failed}: {''.join(c if c.isprintable() else ' ' for c in why[:500])}"


def require(right: bool, what: str, value: Any) -> None:
    """Raises MessageError for a value that a site may not send."""
    if not right:
        raise MessageError(f"{what} cannot be {value}.")


def check_whole(what: str, numbers: Any, least: int, most: int) -> None:
    """Raises MessageError for anything but a list of whole numbers within these bounds."""
    right = isinstance(numbers, list) and all(
        type(number) is int and least <= number <= most for number in numbers
    )
    require(right, what, numbers)


def check_versions(states: Any, names: Iterable[str], clients: list[int], round: int) -> None:
    """Raises MessageError for anything but a version of each of these clients' states, by name of
    the state.
    """
    require(isinstance(states, dict) and states.keys() == {*names}, "states", states)
    for name, versions in states.items():
        check_whole(f"states.{name}", versions, NONE, round)
        require(len(versions) == len(clients), f"states.{name}", versions)


def checked_upload(
    content: Mapping[str, Any],
    round: int,
    expected: Expected,
    sizes_N: np.ndarray,
    solver: LocalSolver,
) -> Upload:
    """The upload of K clients.

    Its tensors have the expected shapes, and its numbers are possible in this round.

    Args:
        sizes_N: number of samples of each client of the run, as the sites reported them.

    Raises:
        Exception: something else was sent; names it.
    """
    for name, (bits, _) in content["levels"].items():
        check_whole(f"the bits of {name}", [bits], 2, 22)
    for name, size in content["packed"].items():
        # with places
        check_whole(f"the size of {name}", [size], 0, 3 * expected.shapes["delta"][name].nbytes)
    upload = read_upload(content, expected.shapes["delta"])
    k, sizes = len(upload.clients), sizes_N[upload.clients]
    require(upload.round == round, "round", upload.round)
    require(np.array_equal(upload.num_samples, sizes), "num_samples", upload.num_samples)
    steps = solver.num_steps(sizes)
    most = {
        "num_steps": (upload.num_steps, steps),
        "num_seen": (upload.num_seen, steps * float(solver.batch_size)),
    }
    for name, (number_K, most_K) in most.items():
        require(
            number_K.shape == (k,) and bool(((number_K >= 0) & (number_K <= most_K)).all()),
            name,
            number_K,
        )
    losses = upload.loss.tolist()
    require(all(abs(loss) <= MOST or not isfinite(loss) for loss in losses), "loss", losses)
    numbers = {"loss": upload.loss.double(), "finite": upload.finite}
    refuse_other(
        "an upload",
        numbers,
        {"loss": torch.zeros((), dtype=torch.float64), "finite": torch.tensor(True)},
        k,
    )
    refuse_misfit(upload, expected.shapes)
    for name in {**expected.notes, **upload.notes}:
        refuse_other(f"the note {name}", upload.notes.get(name, {}), expected.notes.get(name, {}))
    return upload
