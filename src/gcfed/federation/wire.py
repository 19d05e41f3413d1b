"""Lines to sites, by which questions and answers pass, and that to a second interpreter.

It is started once and serves one run after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from gcfed.federated.messages import MessageError
from gcfed.federated.processes.launch import end_with_parent
from gcfed.federation.packing import unpack
from gcfed.federation.site import About, Site


class Answer(NamedTuple):
    """What came from a site to the question of this number: a message, or why the site is ``gone``."""

    site: str
    number: int
    message: bytes
    gone: str = ""

    @property
    def content(self) -> dict[str, Any]:
        """What it says.

        Raises:
            MessageError: it says nothing, or why the site cannot answer.
        """
        if self.gone:
            raise MessageError(self.gone)
        content = unpack(self.message, "answer")
        if "failure" in content:
            raise MessageError(str(content["failure"]))
        return content


class Line:
    """Questions to sites and their answers, through a pipe to who reaches them; a call of one waits for no other.

    What a site answers is bytes here: whoever holds the other end sends on nothing else.
    """

    sites: list[str]  # their names, in an order that does not change
    pipe: Connection
    ended: str  # what it means that the pipe has been closed at its other end
    lost: bool = False  # whether a site, or all of them, cannot be reached by it any more

    def send(self, site: str, number: int, verb: str, about: About, message: bytes) -> None:
        with suppress(BrokenPipeError):  # then nothing can be received
            self.pipe.send((site, number, verb, json.dumps(about), message))

    def receive(self, seconds: float) -> Answer | None:
        """The next answer; None where none has come after so many seconds.

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

    def renew(self, vanished: Collection[str]) -> Collection[str] | None:
        """Begins anew with all sites that are there, if one of those that had vanished is: who is still away; None
        where it has not begun anew.
        """
        return None


_process: subprocess.Popen | None = None
_pipe: Connection


class Interpreter(Line):
    """One site with all clients in the second interpreter: keeps their states in ``home``, trains on ``device``."""

    ended = "federation=wire: the clients' interpreter has ended; its own words stand above."

    def __init__(self, home: Path, config: Path, data_dir: str, device: str) -> None:
        global _process, _pipe
        if _process is None or _process.poll() is not None:
            _pipe, theirs = Pipe()
            code = f"from gcfed.federation.wire import serve; serve({theirs.fileno()})"
            _process = python("-c", code, pass_fds=[theirs.fileno()])
            theirs.close()
        accelerator = "cpu" if device == "cpu" else "gpu"
        settings = {"threads": torch.get_num_threads(), "accelerator": accelerator}
        write_settings(home / "gcfed.yaml", config, data_dir, **settings)
        self.sites, self.pipe = ["clients"], _pipe
        self.pipe.send(home)


def python(*words: str, environment: dict[str, str] | None = None, **how: Any) -> subprocess.Popen:
    """A Python that finds what this one does, the user's own classes too; it ends with this one, and a Ctrl-C that is
    for this one does not reach it.
    """
    places = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    known = os.environ | {"PYTHONPATH": places} | (environment or {})
    how |= {"start_new_session": True, "preexec_fn": end_with_parent}
    return subprocess.Popen([sys.executable, *words], env=known, **how)


def write_settings(path: Path, config: Path, data_dir: str, **settings: Any) -> None:
    """The ``gcfed.yaml`` of a site on this machine, which reads the run's own config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    places = {"config": str(config), "data_dir": str(Path(data_dir).resolve())}
    OmegaConf.save(OmegaConf.create(places | settings), path)


def serve(end: int) -> None:
    """The second interpreter's program: answers until the pipe, whose end has this descriptor, is closed."""
    pipe = Connection(end)
    with suppress(EOFError):
        while True:
            asked = pipe.recv()
            if isinstance(asked, Path):
                site = Site("clients", asked / "gcfed.yaml", asked)
            else:
                name, number, *question = asked
                pipe.send((name, number, site.answer(*question)))
