"""Questions to sites and their answers, and the line on which they travel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from gcfed.federated.messages import MessageError
from gcfed.federated.wire import unpack

RESUME = "The same command with ckpt_path=last goes on after the last finished round."
About = dict[str, Any]
"""The plain values of a question."""


class Answer(NamedTuple):
    """A site's answer to the question with this number: a message, or why the site is ``gone``."""

    site: str
    number: int
    message: bytes
    gone: str = ""

    @property
    def content(self) -> dict[str, Any]:
        """The content of the message.

        Raises:
            MessageError: there is none, or it says why the site cannot answer.
        """
        if self.gone:
            raise MessageError(self.gone)
        content = unpack(self.message, "answer")
        if "failure" in content:
            raise MessageError(str(content["failure"]))
        return content


@contextmanager
def counted_against(site: str, failures: dict[str, str], failed: str = "failed") -> Iterator[None]:
    """Reads the answer of a site. An error becomes that site's entry in ``failures``; without one the entry goes."""
    try:
        yield
        del failures[site]
    except Exception as error:  # the words may be the site's: they must be safe to print
        failures[site] = f"{failed}: {''.join(c if c.isprintable() else ' ' for c in str(error)[:500])}"


class Line:
    """A pipe to a process that passes questions on to sites, and their answers back as bytes. No call waits for
    another.
    """

    sites: list[str]  # their names, in an order that does not change
    pipe: Connection
    ended: str  # the error for a pipe that was closed at its other end
    lost: bool = False  # True once a site, or all of them, cannot be reached any more

    def complete(self) -> bool:
        """Whether a new line would reach all sites."""
        return False

    def send(self, site: str, number: int, verb: str, about: About, message: bytes) -> None:
        with suppress(BrokenPipeError):  # ``receive`` reports it
            self.pipe.send((site, number, verb, json.dumps(about), message))

    def receive(self, seconds: float) -> Answer | None:
        """The next answer, or None after so many seconds.

        Raises:
            ConnectionError: no answer can come any more.
        """
        try:
            answer = Answer(*self.pipe.recv()) if self.pipe.poll(seconds) else None
            self.lost |= answer is not None and bool(answer.gone)
            return answer
        except (EOFError, ConnectionResetError):
            self.lost = True
            raise ConnectionError(self.ended) from None
