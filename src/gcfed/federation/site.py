"""A site's program: the clients that it holds train on its own data, and keep what they keep on its own disk."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.func import functional_call

from gcfed import __version__
from gcfed.checkpoints.reading import fingerprint
from gcfed.federated.messages import Download
from gcfed.federated.stacks import Stacks
from gcfed.federation.clients import as_run, build_clients, check_config
from gcfed.federation.packing import (
    MessageError,
    pack_upload,
    refuse_other,
    unpack,
    unpack_download,
    unpack_reply,
)
from gcfed.utils.checked import Count, Whole, checked

AT_ONCE = 2_000  # samples of a test

About = dict[str, Any]
"""What goes beside a message's tensors, as JSON."""


@checked
@dataclass(frozen=True)
class Settings:
    """What a site brings: its ``gcfed.yaml``, of which all keys may be left out.

    Attributes:
        clients: ids of the run's clients that it holds; None: those that the server proposes.
        arrays: the ``.npz`` that is its data, as for ``data=arrays``.
        folder: the folder of images that is its data, as for ``data=image_folder``.
        data_dir: where data sets lie that the run's config names.
        states: where its clients' states lie, a folder a run; None: in its NVFlare workspace.
        trust_config: whether the server's config may build any class, and name any file of this machine.
        threads: of torch; None: as many as there are cores.
        accelerator: ``cpu``, ``gpu`` or ``auto``.
    """

    clients: list[Whole] | None = None
    arrays: str | None = None
    folder: str | None = None
    data_dir: str | None = None
    states: str | None = None
    trust_config: bool = False
    threads: Count | None = None
    accelerator: Literal["cpu", "gpu", "auto"] = "cpu"

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Those of a file; the defaults where there is none.

        Raises:
            ValueError: an unknown key or an impossible value; names them.
        """
        given: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
        if not isinstance(given, dict):
            raise ValueError(f"{path} has no keys.")
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


class Site:
    """Answers the server's messages, one after the other.

    Args:
        name: of the site.
        settings: its ``gcfed.yaml``, read anew for each run.
        home: a folder of its own, where states lie unless the settings name another.
    """

    def __init__(self, name: str, settings: Path, home: Path) -> None:
        self.name, self.settings, self.home = name, settings, home
        self.run = ""
        self.stacks: Stacks | None = None
        self._lock = threading.Lock()

    def answer(self, verb: str, about: About, message: bytes) -> tuple[About, bytes]:
        """What the site has to say to ``configure``, ``fit``, ``reply`` or ``test``.

        Raises:
            ValueError, OSError: why it refuses, or cannot.
        """
        with self._lock:
            if verb == "configure":
                return self.configure(about, message), b""
            if self.stacks is None or about["run"] != self.run:
                raise MessageError(f"{self.name} knows nothing of the run {about['run']}: its job has begun anew.")
            return {"fit": self.fit, "reply": self.reply, "test": self.test}[verb](self.stacks, about, message)

    def configure(self, about: About, message: bytes) -> About:
        """Builds the clients' side of a run; refuses another version of this project, or another model."""
        if about["version"] != __version__:
            raise ValueError(f"the server has gcfed {about['version']}, and {self.name} has {__version__}.")
        own, run = Settings.read(self.settings), str(about["run"])
        proposed, num_clients = about["share"], about["num_clients"]
        self.clients = sorted(proposed if own.clients is None else own.clients)
        config: Any = OmegaConf.to_container(OmegaConf.create(message.decode()))
        folder = Path(own.states or self.home / "states") / Path(run).name
        cfg = self._own(config, own, folder, about)
        torch.set_num_threads(own.threads or torch.get_num_threads())
        self.stacks = None  # and with it its memory
        stacks = build_clients(cfg, own.accelerator)
        data = stacks.program.data
        if data.num_clients != num_clients or not set(self.clients) <= set(range(num_clients)):
            raise ValueError(f"{self.name} holds the clients {self.clients}, and the run has {num_clients}, from 0 on.")
        self.model = stacks.program.module.broadcast_state()
        refuse_other("the server's model", {n: torch.empty(s, device="meta") for n, s in about["shapes"].items()},
                     {name: t.shape for name, t in self.model.items()})  # fmt: skip
        self._same_data(folder / "data.txt", fingerprint(data), about["resumed"])
        self.stacks, self.run = stacks, run
        sizes = data.sizes(np.array(self.clients)).tolist()
        return {"clients": self.clients, "sizes": sizes, "stores": stacks.stores.names, "version": __version__}

    def _own(self, config: dict[str, Any], own: Settings, folder: Path, about: About) -> DictConfig:
        """The config, made this site's: with its folders and its data."""
        if not own.trust_config:
            given = {"arrays": own.arrays, "folder": own.folder}
            data = {} if any(given.values()) else config["data"]
            check_config(config | {"data": data}, f"{self.name}: the server")
        cfg = as_run(config, str(folder), str(folder / "clients"))
        if own.data_dir is not None and "data_dir" in cfg.data.dataset:
            cfg.data.dataset.data_dir = own.data_dir
        cfg.paths.data_dir = own.data_dir or "data"
        if own.arrays is None and own.folder is None:
            return cfg
        cfg.data.pop("dataset")
        transform = {key: value for key, value in about["transform"].items() if key in cfg.data.transform}
        return OmegaConf.merge(cfg, {  # type: ignore[return-value]
            "data": {
                "_target_": "gcfed.federation.own_data.own_data", "arrays": own.arrays, "folder": own.folder,
                "clients": self.clients, "classes": about["classes"], "transform": transform,
                "data_dir": own.data_dir or str(self.home / "cache"),
            }
        })  # fmt: skip

    def _same_data(self, path: Path, checksum: str, resumed: bool) -> None:
        """Refuses to go on with other data than those that a run began with."""
        if resumed and path.is_file() and path.read_text() != checksum:
            raise ValueError(f"the data of {self.name} are not those that the run began with: put them back.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(checksum)

    def fit(self, stacks: Stacks, about: About, message: bytes) -> tuple[About, bytes]:
        """Trains some of its clients, from the states that the server counts."""
        clients, device = np.array(about["clients"], dtype=np.int64), stacks.program.module.device
        if strangers := sorted(set(about["clients"]) - set(self.clients)):
            raise MessageError(f"{self.name} does not hold the clients {strangers}.")
        download = unpack_download(message, self.model).to(device)
        for name, references in about["states"].items():
            stacks.stores.open(name).adopt(references)
        uploads = [pack_upload(upload) for upload in stacks.fit(download, clients)]
        said = {"round": download.round, "lengths": [len(upload) for upload in uploads]}
        return said | {"states": self._written(stacks, about["clients"])}, b"".join(uploads)

    def reply(self, stacks: Stacks, about: About, message: bytes) -> tuple[About, bytes]:
        """What the server tells its clients of a round that is over."""
        reply, index = unpack_reply(message)
        device = stacks.program.module.device
        told = {part: {name: t.to(device) for name, t in tensors.items()} for part, tensors in reply.items()}
        stacks.reply(told, Download(index, 0, 0.0, {}, np.array([])))
        return {"round": index, "states": self._written(stacks, about["clients"])}, b""

    def _written(self, stacks: Stacks, clients: Sequence[int]) -> Mapping[str, Any]:
        return {name: stacks.stores.open(name).written(clients) for name in stacks.stores.names}

    def test(self, stacks: Stacks, about: About, message: bytes) -> tuple[About, bytes]:
        """Tests a model on what its clients hold for tests: column → mean and number of labels."""
        module, data = stacks.program.module, stacks.program.data
        state = {name: t.to(module.device) for name, t in unpack(message, "model")[0].items()}
        index = torch.from_numpy(np.concatenate([data.tests_of_clients.client(k) for k in self.clients]))
        sums, labels = dict.fromkeys(module.task.columns, 0.0), 0
        module.net.eval()
        with torch.no_grad():
            for part in index.to(module.device).split(AT_ONCE):
                x, y = data.fetch(part, None)
                real = module.task.real(y)
                labels += int(real.sum())
                for column, scores in module.task.scores(functional_call(module.net, state, (x,)), y).items():
                    sums[column] += float((scores * real).double().sum())
        return {"round": about["round"], "scores": {c: (s / max(labels, 1), labels) for c, s in sums.items()}}, b""
