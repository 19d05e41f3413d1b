"""The line to a second interpreter, which is started once and serves one run after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from omegaconf import OmegaConf

from gcfed.federation.site import Site
from gcfed.federation.sites import Line

_process: subprocess.Popen | None = None
_pipe: Connection


class Interpreter(Line):
    """One site with all clients, in the second interpreter.

    Args:
        home: where it keeps their states.
        data_dir: where it finds data sets.
        device: on which it trains, ``cpu`` or ``cuda``.
    """

    ended = "federation=wire: the clients' interpreter has ended; its own words stand above."

    def __init__(self, home: Path, data_dir: str, device: str) -> None:
        own = {"data_dir": data_dir, "trust_config": True, "threads": torch.get_num_threads()}
        home.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(
            OmegaConf.create(own | {"accelerator": "cpu" if device == "cpu" else "gpu"}), home / "gcfed.yaml"
        )
        self.sites, self.pipe = ["clients"], _started()
        self.pipe.send(home)


def _started() -> Connection:
    """The pipe to the second interpreter."""
    global _process, _pipe
    if _process is None or _process.poll() is not None:
        _pipe, theirs = Pipe()
        code = f"from gcfed.federation.wire import serve; serve({theirs.fileno()})"
        places = os.pathsep.join(filter(None, sys.path))  # the user's own classes, too
        environment = os.environ | {"PYTHONPATH": places}
        _process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
    return _pipe


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
                pipe.send((name, number, *site.answer(*question)))
