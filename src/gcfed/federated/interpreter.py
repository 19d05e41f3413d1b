"""Clients in a second interpreter that gets messages and nothing else (``federation=wire``).

It has the run's config, the data and the clients' states, but no object of the server. A method that reads something
without sending it fails there. So if a run over the wire equals the run in memory, its messages are complete.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gcfed.federated.messages import Download, Expected, Upload
from gcfed.federated.parallel.launch import end_with_parent
from gcfed.federated.stacks import Stacks
from gcfed.federated.state.client_store import ClientStore
from gcfed.federated.training.forward import Params
from gcfed.federated.wire import pack, read_upload, unpack, unpack_download, upload_content
from gcfed.utils.files import in_words


class ClientEnd:
    """The clients' end of a wire. The clients train from messages, their data and their stores.

    Args:
        cfg: the config of the clients' side.
        accelerator: cpu, gpu or auto.
        assemble: :func:`gcfed.assemble.assemble`, which this package may not import.
    """

    def __init__(self, cfg: DictConfig, accelerator: str, assemble: Callable[..., Any]) -> None:
        torch.set_float32_matmul_precision(cfg.get("precision_matmul") or "highest")
        parts = assemble(cfg, clients_only=True)
        self.stacks: Stacks = parts.loop.stacks
        self.module, self.data, self.stores = parts.module, parts.data, parts.loop.stores
        self.module.trainer = Trainer(
            accelerator=accelerator, devices=1, precision=cfg.precision, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=list(self.stacks.program.parts),
        )  # fmt: skip
        self.module.to(self.module.trainer.strategy.root_device)
        self.data.to_device(self.module.device, next(self.module.parameters()).dtype, self.module.memory_format)
        for store in self.stores.opened.values():
            store.shared = True  # states are files, which the server or this site's next process reads

    def fit(self, download: Download, clients: list[int]) -> list[dict[str, Any]]:
        """Trains these clients. Returns their uploads, as contents of a message."""
        trained = self.stacks.fit(download.to(self.module.device), np.array(clients, dtype=np.int64))
        return [upload_content(upload.to(torch.device("cpu"))) for upload in trained]

    def reply(self, message: bytes) -> None:
        """Gives the server's reply to the clients of the last round."""
        self.stacks.reply(tree_map_only(Tensor, lambda t: t.to(self.module.device), unpack(message)))


_process: subprocess.Popen | None = None
_pipe: Connection


class Wire(Stacks):
    """The transport to a second interpreter, which trains all clients.

    The clients' states are files in the run's folder. The second interpreter writes them, and this process decides
    which version is valid, as it does for the processes of one run.

    Args:
        stacks: the transport of the simulation, which this one replaces.
        cfg: the run's config.
    """

    other_process = True

    def __init__(self, stacks: Stacks, cfg: DictConfig) -> None:
        super().__init__(stacks.program, stacks.stores, stacks.per_round)
        self.cfg = cfg

    def start(self) -> None:
        if self.program.module.trainer.world_size > 1:
            raise ValueError("federation needs trainer.devices=1, because other processes train.")
        self.begin()

    def begin(self) -> None:
        """Sends the config to the clients."""
        for name, store in self.stores.of_clients.items():  # server parts hold the old stores, which stay empty
            self.stores.opened[name] = ClientStore(store.folder)
        device = self.program.module.device.type
        cfg: Any = OmegaConf.to_container(self.cfg, resolve=True)
        cfg |= {"federation": None, "callbacks": {}, "logger": {}}
        self._ask("configure", OmegaConf.to_yaml(cfg), "cpu" if device == "cpu" else "gpu", torch.get_num_threads())

    def fit(self, download: Download, clients: np.ndarray, expected: Expected | None = None) -> Iterator[Upload]:
        assert expected is not None
        ids = clients.tolist()
        versions = {name: [store.version(k) for k in ids] for name, store in self.stores.of_clients.items()}
        for content in self._ask("fit", pack(vars(download)), ids, versions)["uploads"]:
            yield read_upload(content, expected.shapes["delta"]).to(self.program.module.device)

    def reply(self, reply: Mapping[str, Params]) -> None:
        self._ask("reply", pack(reply))

    def rehearse(self, *_: Any, **__: Any) -> Iterator[Upload]:
        raise ValueError("metrics=gap and metrics=leakage work with federation=none only.")

    def _ask(self, *question: Any) -> dict[str, Any]:
        """The answer of the second interpreter. It starts with the first run of this process and serves later runs.

        Raises:
            ConnectionError: it has ended.
            ValueError: it could not answer; says why.
        """
        global _process, _pipe
        if _process is None or _process.poll() is not None:
            _pipe, theirs = Pipe()
            code = "from gcfed.assemble import assemble; from gcfed.federated.interpreter import serve"
            _process = python("-c", f"{code}; serve({theirs.fileno()}, assemble)", pass_fds=[theirs.fileno()])
            theirs.close()
        try:
            _pipe.send(question)
            content = unpack(_pipe.recv_bytes())
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise ConnectionError("federation=wire: the second interpreter has ended; see its error above.") from None
        except BaseException:  # interrupted: its late answer would be read as the answer to the next question
            _process.kill()
            raise
        if "failure" in content:
            raise ValueError(f"federation=wire: {content['failure']}")
        return content


def serve(descriptor: int, assemble: Callable[..., Any]) -> None:
    """The program of the second interpreter. It answers until the pipe with this file descriptor is closed."""
    pipe = Connection(descriptor)
    end: Any = None
    with suppress(EOFError):
        while True:
            verb, *question = pipe.recv()
            answer: dict[str, Any] = {}
            try:
                if verb == "configure":
                    end, (config, accelerator, threads) = None, question  # frees the memory of the run before
                    torch.set_num_threads(threads)
                    end = ClientEnd(OmegaConf.create(config), accelerator, assemble)
                elif verb == "fit":
                    message, clients, versions = question
                    for name, of_each in versions.items():
                        known = {k: version for k, version in zip(clients, of_each, strict=True) if version is not None}
                        end.stores.opened[name].take(known)
                    answer["uploads"] = end.fit(unpack_download(message), clients)
                else:
                    end.reply(*question)
            except Exception as error:
                answer["failure"] = f"{type(error).__name__}: {in_words(error)}"
            pipe.send_bytes(pack(answer))


def python(*words: str, environment: dict[str, str] | None = None, **how: Any) -> subprocess.Popen:
    """Starts a Python with this one's import path. It ends with this process, and ignores Ctrl-C in the terminal."""
    places = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    known = os.environ | {"PYTHONPATH": places} | (environment or {})
    how |= {"start_new_session": True, "preexec_fn": end_with_parent}
    return subprocess.Popen([sys.executable, *words], env=known, **how)
