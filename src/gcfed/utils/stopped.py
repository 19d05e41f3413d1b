"""The end of a command that a signal stops."""

import re
import signal
from types import FrameType
from typing import NoReturn

SENTENCE = re.compile(r"Stopped by SIG[A-Z]+\b")


class Stopped(SystemExit):
    """A signal ended the command. The exit status is 128 plus its number, as a shell reports it.

    ``str`` gives one sentence. ``where`` is its end: the round, and how to continue.
    """

    def __init__(self, signum: int, where: str = "") -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.where = where

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        return f"Stopped by {name}{self.where}."


def tells_of_signal(message: str) -> bool:
    """Whether a text is the sentence of :class:`Stopped`."""
    return SENTENCE.match(message) is not None


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """The commands' handler of SIGTERM. Lightning calls it after its own handler."""
    raise Stopped(signum)
