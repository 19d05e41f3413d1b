"""The line to a second interpreter, which is started once and serves one run after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from gcfed.federation.site import Site
from gcfed.federation.sites import Answer, Line

_process: subprocess.Popen | None = None
_pipe: Connection


class Interpreter(Line):
    """One site with all clients, in the second interpreter.

    Args:
        home: where it keeps their states.
        data_dir: where it finds data sets.
        device: on which it trains, ``cpu`` or ``cuda``.
    """

    def __init__(self, home: Path, data_dir: str, device: str) -> None:
        self.sites, self.home = ["clients"], home
        own = {"data_dir": data_dir, "trust_config": True, "threads": torch.get_num_threads()}
        home.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(
            OmegaConf.create(own | {"accelerator": "cpu" if device == "cpu" else "gpu"}), home / "gcfed.yaml"
        )
        _start()

    def send(self, site: str, number: int, verb: str, about: dict[str, Any], message: bytes) -> None:
        with suppress(BrokenPipeError):  # then it cannot be received from
            _pipe.send((self.home, number, verb, about, message))

    def receive(self, seconds: float) -> Answer | None:
        try:
            return Answer("clients", *_pipe.recv()) if _pipe.poll(seconds) else None
        except (EOFError, ConnectionResetError):
            raise ConnectionError(
                "federation=wire: the clients' interpreter has ended; its own words stand above."
            ) from None


def _start() -> None:
    global _process, _pipe
    if _process is None or _process.poll() is not None:
        _pipe, theirs = Pipe()
        code = f"from gcfed.federation.wire import serve; serve({theirs.fileno()})"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
        }  # the user's own classes, too
        _process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment)
        theirs.close()


def serve(end: int) -> None:
    """The second interpreter's program: answers until the pipe, whose end has this descriptor, is closed."""
    site, pipe = Site("clients", Path(), Path()), Connection(end)
    with suppress(EOFError):
        while True:
            home, number, *question = pipe.recv()
            if site.home != home:
                site = Site("clients", home / "gcfed.yaml", home)
            pipe.send((number, *site.answer(*question)))
