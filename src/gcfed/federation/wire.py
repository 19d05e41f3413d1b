"""Every message to bytes and back: the clients' program runs in a second interpreter that shares no object.

``federation=wire``. That interpreter gets the composed config, from which it builds the clients' data, network and
client parts, and keeps their states in a folder of its own. What a method reads without sending it is not there, so a
run that equals the one by reference shows that the method's messages are whole. It is a check, not a way to train
faster: one process, on the CPU, without resuming.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from gcfed.assemble import described
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stacks import Stacks
from gcfed.federated.transport import Shapes, Transport
from gcfed.federation.clients import as_run, build_clients, clients_config
from gcfed.federation.packing import (
    MessageError,
    pack_download,
    pack_reply,
    pack_upload,
    unpack_download,
    unpack_reply,
    unpack_upload,
)


class Wire(Transport):
    """The transport to a second interpreter.

    Args:
        stacks: the simulation's, which knows who comes back and does how much.
        shapes: what a client sends in the present round.
        cfg: the run's config, of which the other side gets what is the clients'.

    Raises:
        ValueError: a run on a GPU, or in several processes.
    """

    def __init__(self, stacks: Stacks, shapes: Shapes, cfg: DictConfig) -> None:
        if cfg.ckpt_path is not None:
            raise ValueError(f"federation=wire cannot resume: leave ckpt_path={cfg.ckpt_path} out.")
        self.stacks, self.shapes, self.cfg = stacks, shapes, cfg
        self._line: Connection | None = None

    def steps(self, clients: np.ndarray, round: int, seed: int) -> np.ndarray:
        return self.stacks.steps(clients, round, seed)

    def arrivals(self, drawn: np.ndarray, round: int, seed: int) -> np.ndarray:
        return self.stacks.arrivals(drawn, round, seed)

    def _ask(self, verb: str, *messages: bytes) -> None:
        if self._line is None:
            self._line = interpreter()
            folder = str(self.cfg.paths.output_dir).encode()
            self._ask(
                "configure",
                clients_config(described(self.cfg, self.stacks.program.data)),
                folder,
                str(torch.get_num_threads()).encode(),
            )
            self._answer()
        for message in (verb.encode(), *messages):
            self._line.send_bytes(message)

    def _answer(self) -> bytes:
        assert self._line is not None
        try:
            status, message = self._line.recv_bytes(), self._line.recv_bytes()
        except EOFError:
            raise RuntimeError(
                "federation=wire: the clients' interpreter has ended; its own words stand above."
            ) from None
        if status == b"error":
            raise ValueError(f"federation=wire: {message.decode()}")
        return message

    def fit(self, download: Download, clients: np.ndarray) -> Iterator[Upload]:
        module = self.stacks.program.module
        if module.device.type != "cpu" or module.trainer.world_size > 1:
            raise ValueError("federation=wire needs trainer=cpu and trainer.devices=1.")
        self._ask("fit", pack_download(download), np.asarray(clients, dtype=np.int64).tobytes())
        shapes = self.shapes()
        while message := self._answer():
            yield unpack_upload(message, download.round, shapes, clients.tolist())

    def rehearse(
        self, download: Download, clients: np.ndarray, solver: LocalSolver | None = None, here: bool = False
    ) -> Iterator[Upload]:
        raise ValueError(
            "federation=wire: metrics=gap and metrics=leakage ask what clients would send: leave them out."
        )

    def reply(self, reply: Mapping[str, Params], download: Download) -> None:
        self._ask("reply", pack_reply(reply, download.round))
        self._answer()


_process: subprocess.Popen | None = None
_line: Connection | None = None


def interpreter() -> Connection:
    """The line to the second interpreter, which is started once and serves one run after the other."""
    global _process, _line
    if _process is None or _process.poll() is not None or _line is None:
        theirs, ours = (os.pipe() for _ in range(2))  # read and write ends
        code = f"from gcfed.federation.wire import serve; serve({theirs[0]}, {ours[1]})"
        _process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs[0], ours[1]), env=_environment())
        os.close(theirs[0])
        os.close(ours[1])
        _line = _Line(ours[0], theirs[1])
        atexit.register(_process.kill)
    return _line


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the user's own classes, too


class _Line(Connection):
    """Two pipes as one connection."""

    def __init__(self, read: int, write: int) -> None:
        super().__init__(read, writable=False)
        self._out = Connection(write, readable=False)

    def send_bytes(self, buf: Any, *args: Any) -> None:
        self._out.send_bytes(buf, *args)


def serve(read: int, write: int) -> None:
    """The second interpreter's program: answers until the line is closed."""
    line = _Line(read, write)
    clients: Stacks | None = None
    while True:
        try:
            verb = line.recv_bytes().decode()
        except EOFError:
            return
        try:
            if verb == "configure":
                config: Any = OmegaConf.to_container(OmegaConf.create(line.recv_bytes().decode()))
                folder = line.recv_bytes().decode()
                torch.set_num_threads(int(line.recv_bytes()))
                clients = build_clients(as_run(config, folder, f"{folder}/clients_wire"))
                clients.stores.start(1)
            elif clients is None:
                raise MessageError("no config has come yet.")
            elif verb == "fit":
                own = clients.program.module.broadcast_state()
                download = unpack_download(line.recv_bytes(), own)
                ids = np.frombuffer(line.recv_bytes(), dtype=np.int64)
                for upload in clients.fit(download, ids):
                    _send(line, b"ok", pack_upload(upload))
                clients.stores.finish_round(download.cohort, download.round)
            elif verb == "reply":
                reply, index = unpack_reply(line.recv_bytes())
                clients.reply(reply, Download(index, 0, 0.0, {}, np.array([])))
            _send(line, b"ok", b"")
        except Exception as error:
            _send(line, b"error", f"{type(error).__name__}: {error}".encode())


def _send(line: Connection, status: bytes, message: bytes) -> None:
    line.send_bytes(status)
    line.send_bytes(message)
