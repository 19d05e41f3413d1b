"""Clients that get nothing but messages, as bytes (``federation=wire``).

The clients are separate objects, built from the run's config. So a method that reads something of
the server without sending it fails there. If a run over the wire equals the run in memory, its
messages are complete.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from numpy import ndarray
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gcfed.assemble import assemble
from gcfed.federated.engine.simulation import ProgramTransport, Simulation
from gcfed.federated.parts.transport import Outcome
from gcfed.federated.protocol.messages import Download, Expected, Params, Upload
from gcfed.federated.protocol.packing import pack, unpack, unpack_download
from gcfed.federated.protocol.uploads import read_upload, upload_content
from gcfed.federated.training.solver import LocalSolver
from gcfed.models.facts import first_weight
from gcfed.utils.refusal import Refusal


class ClientEnd:
    """The clients' end of a wire. The clients train from messages, their data and their stores.

    Args:
        cfg: the config of the clients' side.
        accelerator, devices: as for Lightning's trainer; one device.
    """

    def __init__(self, cfg: DictConfig, accelerator: str, devices: Any = 1) -> None:
        torch.set_float32_matmul_precision(cfg.get("precision_matmul") or "highest")
        assembly = assemble(cfg, clients_only=True)
        run = assembly.loop.run
        self.simulation = run.simulation
        self.stores = run.setup.stores
        self.module = assembly.module
        self.data = assembly.data
        self.module.trainer = Trainer(
            accelerator=accelerator,
            devices=devices,
            precision=cfg.precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(self.simulation.program.parts),
        )
        self.module.to(self.module.trainer.strategy.root_device)
        self.data.to_device(
            self.module.device, first_weight(self.module.net).dtype, self.module.memory_format
        )

    def fit(
        self,
        download: Download,
        clients: ndarray,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        """Trains these clients. Calls ``send`` with their uploads, as contents of a message."""

        def send_content(upload: Upload) -> None:
            send(upload_content(upload.to(torch.device("cpu"))))

        self.simulation.fit(download.to(self.module.device), clients, send_content)

    def reply(self, message: bytes) -> None:
        """Gives the server's reply to the clients of the last round, and ends the round."""
        self.simulation.reply(
            tree_map_only(Tensor, lambda t: t.to(self.module.device), unpack(message))
        )
        self.end_round()

    def end_round(self) -> None:
        """Ends the last round, also if there was no reply."""
        self.simulation.end_round()


class SeparateClients(ProgramTransport):
    """A transport to clients that are built from the config a second time."""

    remote = own_data = False
    separate_clients = True

    def rehearse(
        self,
        download: Download,
        clients: ndarray,
        solver: LocalSolver | None = None,
        here: bool = False,
    ) -> Iterator[Upload]:
        raise Refusal("A part rehearses, which works with federation=none only: leave it out.")


class Wire(SeparateClients):
    """Clients in this process. All messages become bytes.

    Args:
        simulation: which it replaces.
        cfg: the run's config.
    """

    def __init__(self, simulation: Simulation, cfg: DictConfig) -> None:
        super().__init__(simulation.program, simulation.stores)
        self.cfg = cfg

    def start(self) -> None:
        cfg: Any = OmegaConf.merge(
            self.cfg, {"federation": None, "callbacks": None, "logger": None}
        )
        device = self.program.module.device
        with isolate_rng(include_cuda=device.type == "cuda"):
            devices = 1 if device.index is None else [device.index]
            self.end = ClientEnd(cfg, device.type, devices)
        for part in self.end.simulation.program.parts:  # so that checkpoints contain their states
            part.stores = self.stores

    def fit(
        self,
        download: Download,
        clients: ndarray,
        receive: Callable[[Upload], None],
        expected: Expected,
    ) -> Outcome:
        def receive_content(content: dict[str, Any]) -> None:
            upload = read_upload(unpack(pack(content)), expected)
            receive(upload.to(self.program.module.device))

        self.end.fit(unpack_download(pack(vars(download))), clients, receive_content)
        return Outcome()

    def reply(self, reply: Mapping[str, Params]) -> None:
        self.end.reply(pack(reply))

    def end_round(self) -> None:
        self.end.end_round()
