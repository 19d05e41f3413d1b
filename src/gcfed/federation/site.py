"""A site's program: the clients that it holds train on its own data, and keep what they keep on its own disk."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from gcfed import __version__
from gcfed.assemble import assemble
from gcfed.checkpoints.reading import fingerprint
from gcfed.data.base import FederatedDataset
from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.partition import Partition, Partitioner
from gcfed.data.sets.images import image_folder
from gcfed.data.sets.own import arrays as read_arrays
from gcfed.federated.messages import Download, MessageError
from gcfed.federated.stacks import Stacks
from gcfed.federation.packing import pack, unpack, unpack_download, upload_content
from gcfed.runs.identity import digest
from gcfed.utils.checked import Count, Whole, checked, fits
from gcfed.utils.compose import Composer, shorthand
from gcfed.utils.files import in_words
from gcfed.utils.machine import cores

#: What clients need of a config; what runs on the server alone is not among it.
OF_CLIENTS = (
    "data", "model", "client", "gc", "attack", "quantization", "metrics", "participation", "partition", "client_store",
    "task", "methods", "seed", "rounds", "eval_every", "precision", "precision_matmul", "channels_last", "tags", "name",
)  # fmt: skip
#: Of these what each machine has for itself: names and folders.
OWN = re.compile(r"tags|name|data\.dataset\.data_dir|client_store\.folder|metrics\.\w+\.folder")
#: In the place of what stays with the server.
PLAIN: dict[str, Any] = {
    "server": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 1.0},
    "aggregator": {"_target_": "gcfed.federated.aggregate.MeanAggregator"},
    "trainer": {"accelerator": "cpu"}, "extras": {"figures": False}, "targets": [], "callbacks": {}, "logger": {},
    "paths": {"root_dir": ".", "data_dir": "data", "log_dir": "logs", "output_dir": "."},
}  # fmt: skip
TEST = 1e-6  # share set aside where a site has no test split: one sample, since a data set must have one
AT_ONCE = 2_000  # samples of a test

About = dict[str, Any]
"""A question or an answer: plain values, and messages as bytes."""


@checked
@dataclass(frozen=True)
class Settings:
    """What a site brings: its ``gcfed.yaml``, of which all keys may be left out; paths go from the file's folder."""

    overrides: list[str] | None = None  # of the run, as its command line has them: experiment=…, data=…, model=…
    config: str | None = None  # or a file with its whole config, as a run's config.yaml
    clients: list[Whole] | None = None  # ids of the run's that it holds; None: those that the server proposes
    arrays: str | None = None  # the .npz that is its data, as for data=arrays
    folder: str | None = None  # or the folder of images, as for data=image_folder
    data_dir: str | None = None  # where data sets lie that the run's config names
    states: str | None = None  # where its clients' states lie, a folder a run; None: in its NVFlare workspace
    threads: Count | None = None  # of torch; None: as many as it may take cores
    accelerator: Literal["cpu", "gpu", "auto"] = "cpu"

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Those of a file; the defaults where there is none.

        Raises:
            ValueError: an unknown key or an impossible value; names them.
        """
        given: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
        try:
            places = {key: given[key] for key in ("config", "arrays", "folder", "data_dir", "states") if given.get(key)}
            return cls(**given | {key: str(path.resolve().parent / place) for key, place in places.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None


class Site:
    """Answers the server's questions, one after the other.

    Args:
        name: of the site.
        settings: its ``gcfed.yaml``, read anew for each run.
        home: a folder of its own, where states lie unless the settings name another.
    """

    stacks: Stacks
    round: int  # of the last download

    def __init__(self, name: str, settings: Path, home: Path) -> None:
        self.name, self.settings, self.home, self.run = name, settings, home, ""
        self.threads = min(torch.get_num_threads(), cores())  # before a run has set another number

    def answer(self, verb: str, about: str, message: bytes) -> bytes:
        """What the site has to say to ``configure``, ``fit``, ``reply`` or ``test``, as a message; or its ``failure``.

        Args:
            about: the question's plain values, as JSON.
            message: the server's, with its tensors.
        """
        verbs = {"configure": self.configure, "fit": self.fit, "reply": self.reply, "test": self.test}
        try:
            asked = json.loads(about)
            if verb != "configure" and asked["run"] != self.run:
                raise MessageError(f"{self.name} knows nothing of the run {asked['run']}: its job has begun anew.")
            return pack("answer", verbs[verb](asked, message))
        except Exception as error:
            return pack("answer", {"failure": f"{type(error).__name__}: {in_words(error)}"})

    def configure(self, about: About, message: bytes) -> About:
        """Builds the clients' side of a run; refuses another version of this project, or other data than before."""
        if about["version"] != __version__:
            raise ValueError(f"the server has gcfed {about['version']}, and {self.name} has {__version__}.")
        if not re.fullmatch(r"[\w-]+", about["run"]):
            raise ValueError(f"the run {about['run']!r} has no name that a folder can have.")
        self.run, own = "", Settings.read(self.settings)
        vars(self).pop("stacks", None)  # and with it its memory
        num_clients: int = fits("num_clients", about["num_clients"], Count)
        share: list[int] = fits("share", about["share"], list[Whole])
        self.clients: list[int] = sorted({*(share if own.clients is None else own.clients)})
        folder = Path(own.states or self.home / "states") / about["run"]
        cfg = self._config(own, folder, about)
        torch.set_num_threads(own.threads or self.threads)
        stacks = build_clients(cfg, own.accelerator)
        data = stacks.program.data
        if data.num_clients != num_clients or not set(self.clients) <= set(range(num_clients)):
            raise ValueError(f"{self.name} holds the clients {self.clients}, and the run has {num_clients}, from 0 on.")
        self.model = stacks.program.module.broadcast_state()  # of whose names and shapes downloads must be
        path, checksum = folder / "data.txt", digest(fingerprint(data))
        if about["resumed"] and path.is_file() and path.read_text() != checksum:
            raise ValueError(f"the data of {self.name} are not those that the run began with: put them back.")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(checksum)
        self.stacks, self.run = stacks, about["run"]
        sizes = data.sizes(np.array(self.clients, dtype=np.int64)).tolist()
        tests = int(stacks.program.module.task.real(torch.from_numpy(data.labels)[self._tests()]).sum())
        return {"clients": self.clients, "sizes": sizes, "tests": tests, "stores": list(stacks.stores.opened)}

    def _config(self, own: Settings, folder: Path, about: About) -> DictConfig:
        """The site's own config with the run's numbers, for its own data and folders.

        Raises:
            ValueError: the run has another config in more than numbers; names the keys.
        """
        whole = OmegaConf.load(own.config) if own.config else Composer()(shorthand(own.overrides or ()))
        config, sent, brings = clients_config(whole), dict(about["config"]), own.arrays or own.folder
        if brings:  # samples of its own take the place of the run's
            known = {*signature(FederatedDataModule).parameters, "size"} - {"dataset"}
            for each in (config, sent):
                each["data"] = {key: value for key, value in each["data"].items() if key in known}
        odd: list[str] = []
        config = adopted(config, sent, odd)
        if odd:
            raise ValueError(
                f"{self.name} takes numbers alone from the server, and its gcfed.yaml has another run: "
                f"{'; '.join(odd[:8])}{f'; and {len(odd) - 8} more' * (len(odd) > 8)}. Name the same choices in both."
            )
        if brings:
            data, classes = config["data"], fits("classes", about["classes"], list[str] | None)
            means = {key: value for key, value in about["transform"].items() if key in data["transform"]}
            data["transform"] = adopted(data["transform"], data["transform"] | means, odd)
            cache, size = own.data_dir or str(self.home / "cache"), data.pop("size", None)
            load = partial(own_samples, own.arrays, own.folder, cache, size, classes, data.get("standardize"))
            dealt = {"_target_": f"{__name__}.deal", "_partial_": True, "clients": self.clients}
            data |= {
                "_target_": f"{FederatedDataModule.__module__}.FederatedDataModule", "dataset": load,
                "partitioner": dealt | {"by": data["partitioner"]},
            }  # fmt: skip
        cfg = OmegaConf.create(config | PLAIN, flags={"allow_objects": True})
        cfg.paths.data_dir, cfg.paths.output_dir = own.data_dir or "data", str(folder)
        cfg.trainer.precision, cfg.client_store.folder = cfg.precision, str(folder / "clients")
        for node in (cfg.metrics or {}).values():
            if "folder" in node:
                node.folder = str(folder)
        if own.data_dir is not None and not brings and "data_dir" in cfg.data.dataset:
            cfg.data.dataset.data_dir = own.data_dir
        return cfg

    def fit(self, about: About, message: bytes) -> About:
        """Trains some of its clients, from the states that the server counts."""
        clients, stores = about["clients"], self.stacks.stores
        if strangers := sorted(set(clients) - set(self.clients)):
            raise MessageError(f"{self.name} does not hold the clients {strangers}.")
        download = unpack_download(message, self.model).to(self.stacks.program.module.device)
        self.round = download.round
        for store, references in stores.told(about["states"], clients):
            store.adopt(references)
        trained = self.stacks.fit(download, np.array(clients, dtype=np.int64))
        uploads = [upload_content(upload.to(torch.device("cpu"))) for upload in trained]
        return {"uploads": uploads, "states": self._written(clients)}

    def reply(self, about: About, message: bytes) -> About:
        """What the server tells its clients of a round that is over."""
        told = Download(self.round, 0, 0.0, {}, np.array([]), unpack(message, "reply"))
        self.stacks.reply(told.to(self.stacks.program.module.device).extra, told)
        return {"states": self._written(about["clients"])}

    def _written(self, clients: Sequence[int]) -> About:
        return {name: store.references(clients) for name, store in self.stacks.stores.opened.items()}

    def test(self, about: About, message: bytes) -> About:
        """Tests a model on what its clients hold for tests: column → mean over the labels."""
        module, data = self.stacks.program.module, self.stacks.program.data
        state = {name: t.to(module.device) for name, t in unpack(message, "model").items()}
        sums, labels = dict.fromkeys(module.task.columns, 0.0), 0
        module.net.eval()
        context = module.trainer.precision_plugin.forward_context()
        with torch.no_grad(), context, module.lent.holding(state):
            for part in self._tests().to(module.device).split(AT_ONCE):
                x, y = data.fetch(part, None)
                real = module.task.real(y)
                labels += int(real.sum())
                for column, scores in module.task.scores(module.net(x), y).items():
                    sums[column] += float((scores * real).double().sum())
        return {"scores": {column: total / max(labels, 1) for column, total in sums.items()}}

    def _tests(self) -> torch.Tensor:
        """Indices of the samples on which its clients test, ``[n]``."""
        held = self.stacks.program.data.tests_of_clients
        tests = [] if held is None else [held.client(client) for client in self.clients]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *tests]))


# ------------------------------------------------------------------------------------------------------- the config
def clients_config(cfg: Any) -> dict[str, Any]:
    """What of a run's config the clients' side reads, resolved."""
    whole = OmegaConf.create(OmegaConf.to_container(cfg))
    whole.paths = PLAIN["paths"]
    resolved: Any = OmegaConf.to_container(whole, resolve=True)
    return {key: resolved[key] for key in OF_CLIENTS if key in resolved}


def adopted(own: Any, sent: Any, odd: list[str], key: str = "") -> Any:
    """A site's config with the numbers of the server's: integers, floats, booleans, and lists of them.

    What else differs stays as the site has it and is added to ``odd``: the server names no class, file or address.
    """
    if OWN.fullmatch(key):
        return own
    if isinstance(own, dict) and isinstance(sent, dict):
        path = f"{key}." if key else ""
        odd += [f"{path}{name} is {str(sent[name])[:40]!r} there, absent here" for name in sorted(sent.keys() - own)]
        return {name: adopted(value, sent.get(name), odd, f"{path}{name}") for name, value in own.items()}
    if _is_number(sent) and (own is None or _is_number(own)):
        return sent
    if own != sent:
        odd.append(f"{key} is {str(sent)[:40]!r} there, {str(own)[:40]!r} here")
    return own


def _is_number(value: Any) -> bool:
    return all(map(_is_number, value)) if isinstance(value, list) else isinstance(value, int | float)


def build_clients(cfg: DictConfig, accelerator: str) -> Stacks:
    """Data, network, client parts and stores; nothing that the server's parts keep."""
    torch.set_float32_matmul_precision(cfg.get("precision_matmul") or "highest")
    parts = assemble(cfg, clients_only=True)
    stacks, module, data = parts.loop.stacks, parts.module, parts.data
    module.trainer = Trainer(
        accelerator=accelerator, devices=1, precision=cfg.precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(stacks.program.parts),
    )  # fmt: skip
    module.to(module.trainer.strategy.root_device)
    data.to_device(module.device, next(module.parameters()).dtype, module.memory_format)
    return stacks


# ----------------------------------------------------------------------------------------------------- its own data
def deal(
    labels: np.ndarray, num_clients: int, *, seed: int, groups: np.ndarray | None = None,
    clients: Sequence[int], by: Partitioner,
) -> Partition:  # fmt: skip
    """The partition of what a site holds among its own clients, by that of the run; the other clients have nothing."""
    owner_n = np.zeros(len(labels), np.int64)
    if len(clients) > 1:
        owner_n = by(labels, len(clients), seed=seed, groups=groups).owners(len(labels))
    return Partition.from_owners(np.array([*clients, -1])[owner_n], num_clients)


def own_samples(
    arrays: str | None, folder: str | None, data_dir: str, size: int | None, classes: Sequence[str] | None,
    standardize: bool | None,
) -> FederatedDataset:  # fmt: skip
    """The samples of a site, their labels as numbers of the run's classes.

    Args:
        arrays, folder: an ``.npz`` or a folder of images; one of them.
        data_dir: where decoded images are cached.
        size: of images, as in ``data=image_folder``.
        classes: the names of the run's; None: labels are no classes.
        standardize: whether the run is by the mean of all sites' samples.

    Raises:
        ValueError: a class that the run does not know, or float vectors to be standardized.
    """
    found = image_folder(folder, data_dir, size, TEST, clients=False) if arrays is None else read_arrays(arrays, TEST)
    if standardize and found.train.x.dtype.kind == "f":
        raise ValueError("data.standardize=true is by the mean of all samples, which no site knows: set it to false.")
    if classes is None or found.class_names is None:
        return found
    if unknown := sorted(set(found.class_names) - set(classes)):
        raise ValueError(f"{found.name} has the class {unknown[0]}, and the run's are {', '.join(classes)}.")
    number = np.array([list(classes).index(name) for name in found.class_names])
    train, test = (replace(split, y=number[split.y]) for split in (found.train, found.test))
    return replace(found, train=train, test=test, num_classes=len(classes), class_names=tuple(classes))
