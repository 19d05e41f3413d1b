"""The answers of sites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gcfed.federated.messages import MessageError
from gcfed.federated.wire import unpack

RESUME = "The same command with ckpt_path=last continues after the last finished round."
NONE = -1  # the version of a client that has no state
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
        failures[site] = f"{failed}: {''.join(c if c.isprintable() else ' ' for c in why[:500])}"  # the site's words
