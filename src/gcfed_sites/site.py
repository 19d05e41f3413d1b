"""A site's program: its clients train on its own data, and keep their states on its own disk."""

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
from omegaconf import DictConfig, OmegaConf

from gcfed import __version__
from gcfed.checkpoints.record import fingerprint
from gcfed.data.base import FederatedDataset
from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.partition import Partition, Partitioner
from gcfed.data.sets.own import arrays as read_arrays
from gcfed.federated.protocol.checks import refuse_other
from gcfed.federated.protocol.messages import Download
from gcfed.federated.protocol.packing import pack, unpack_download
from gcfed.federated.state.store import NONE
from gcfed.federated.state.versioned_files import Key
from gcfed.folders.identity import digest
from gcfed.utils.checked import Count, Weight, Whole, checked, validated
from gcfed.utils.compose import composed, shorthand
from gcfed.utils.home import expand_home
from gcfed.utils.refusal import Refusal, message_of
from gcfed.wire import ClientEnd
from gcfed_sites.agreement import adopted, clients_config, frozen_checksum
from gcfed_sites.answers import About

# share of samples held out if a site has no test split: one sample, because a data set must have
# one
TEST = 1e-6


@checked
@dataclass(frozen=True)
class Settings:
    """A site's ``gcfed.yaml``. All keys are optional. Paths are relative to the file's folder."""

    # of the run, as on its command line: experiment=…, data=…, model=…
    overrides: list[str] | None = None
    config: str | None = None  # or a file with a whole config, like a run's config.yaml
    # ids of the run's clients that it holds; None: those that the server proposes
    clients: list[Whole] | None = None
    arrays: str | None = None  # its data as a .npz, as for data=arrays
    data_dir: str | None = None  # folder of the data sets that the config names
    # folder of its clients' states, with one folder per run; None: in its NVFlare workspace
    states: str | None = None
    accelerator: Literal["cpu", "gpu", "auto"] = "cpu"
    # the most passes over a client's samples that the server may ask for in a round
    passes: Count = 1000

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings in a file; the defaults if there is none. An error names the key."""
        if not path.is_file():
            return cls()
        written: Any = OmegaConf.load(path)
        expand_home(written)
        given: Any = OmegaConf.to_container(written)
        for key in given.keys() & {"config", "arrays", "data_dir", "states"}:
            given[key] = given[key] and str(path.resolve().parent / given[key])
        return cls(**given)


class Site:
    """Answers the server's questions, one at a time.

    Args:
        name: of the site.
        settings: its ``gcfed.yaml``, which is read for each run.
        home: its folder; states are kept there unless the settings name another folder.
    """

    end: ClientEnd
    run = ""  # the run that it takes part in

    def __init__(self, name: str, settings: Path, home: Path) -> None:
        self.name = name
        self.settings = settings
        self.home = home

    def answer(self, verb: str, about: str, message: bytes) -> bytes:
        """The answer to ``configure``, ``fit`` or ``reply`` as a message, or a ``failure``.

        Args:
            about: the question's plain values, as JSON.
            message: the server's tensors.
        """
        verbs = {"configure": self.configure, "fit": self.fit, "reply": self.reply}
        try:
            asked = json.loads(about)
            if verb != "configure" and asked["run"] != self.run:
                raise Refusal(
                    f"{self.name} does not know the run {asked['run']}, because its job has begun"
                    " anew."
                )
            return pack(verbs[verb](asked, message))
        except Exception as error:
            notes = getattr(error, "__notes__", ())
            words = [f"{type(error).__name__}: {message_of(error)}", *notes]
            return pack({"failure": " ".join(words)})

    def configure(self, about: About, message: bytes) -> About:
        """Builds the clients of a run.

        Refuses another version of this project, data that have changed, and more work than the
        site allows.
        """
        self._refuse_other_run(about)
        self.run = ""
        vars(self).pop("end", None)  # frees its memory
        settings = Settings.read(self.settings)
        # it becomes part of a config
        share: list[int] = validated("share", about["share"], list[Whole])
        self.clients: list[int] = sorted(
            {*(share if settings.clients is None else settings.clients)}
        )
        folder = Path(settings.states or self.home / "states") / about["run"]
        end = ClientEnd(self._config(settings, folder, about), settings.accelerator)
        end.stores.shared = True  # states are files, which this site's next process reads
        self._refuse_other_clients(end, about["num_clients"])
        self._refuse_long_rounds(end, settings.passes)
        self._refuse_other_constants(end, about["frozen"])
        self._refuse_changed_data(end, folder / "data.txt", about["resumed"])
        self.end = end
        self.run = about["run"]
        sizes = end.data.sizes(np.array(self.clients, dtype=np.int64)).tolist()
        return {"clients": self.clients, "sizes": sizes}

    def _refuse_other_run(self, about: About) -> None:
        if about["version"] != __version__:
            raise Refusal(
                f"the server has gcfed {about['version']}, and {self.name} has {__version__}."
            )
        if not re.fullmatch(r"[\w-]+", about["run"]):
            raise Refusal(f"the run {about['run']!r} has a name that cannot name a folder.")

    def _refuse_other_clients(self, end: ClientEnd, num_clients: int) -> None:
        known = set(self.clients) <= set(range(end.data.num_clients))
        if end.data.num_clients != num_clients or not known:
            raise Refusal(
                f"{self.name} holds the clients {self.clients}, and the run has {num_clients}, from"
                " 0 on."
            )

    def _refuse_long_rounds(self, end: ClientEnd, passes: int) -> None:
        """Raises Refusal if the server asks for more local steps than the site allows."""
        solver = end.simulation.program.solver
        for client in self.clients:
            size = int(end.data.sizes(np.array([client]))[0])
            steps = int(solver.num_steps(np.array([size]))[0])
            most = passes * solver.batching.count(size)
            if steps > most:
                raise Refusal(
                    f"the server asks client {client} for {steps:,} local steps in a round, and"
                    f" {self.name} allows {most:,}: lower client.epochs or client.steps, or raise"
                    " passes in the site's gcfed.yaml."
                )

    def _refuse_other_constants(self, end: ClientEnd, frozen: str) -> None:
        """Raises Refusal if the parameters that no message contains are not the server's."""
        if frozen_checksum(end.module.net, end.module.travels) != frozen:
            raise Refusal(
                f"the network of {self.name} has other frozen parameters than the server's: give"
                " both the same model.start, model.pretrained or model.folder."
            )

    def _refuse_changed_data(self, end: ClientEnd, path: Path, resumed: bool) -> None:
        checksum = digest(fingerprint(end.data))
        if resumed and path.is_file() and path.read_text() != checksum:
            raise Refusal(
                f"the data of {self.name} have changed since the run began: restore them."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(checksum)

    def _config(self, settings: Settings, folder: Path, about: About) -> DictConfig:
        """The site's own config with the server's numbers, for its own data and folders.

        Raises Refusal, with the keys, if the configs differ in more than these numbers.
        """
        cfg: Any
        if settings.config:
            cfg = OmegaConf.load(settings.config)
            expand_home(cfg)
        else:
            cfg = composed(shorthand(settings.overrides or ()))
        cfg.paths.output_dir = str(folder)
        whole: Any = OmegaConf.to_container(cfg, resolve=True)
        config = clients_config(whole)
        sent = dict(about["config"])
        if settings.arrays:  # they replace the run's data set
            for each in (config, sent):
                each["data"] = without_dataset(each["data"])
        differing: list[str] = []
        config = adopted(config, sent, differing)
        if settings.arrays:
            # the means of the run's own images, if the run has found them
            transform = config["data"]["transform"]
            of_server = transform | about["transform"]
            config["data"]["transform"] = adopted(transform, of_server, differing, "data.transform")
        if differing:
            takes = (
                f"{self.name} takes only numbers from the server, and its gcfed.yaml has"
                " another run"
            )
            raise Refusal(f"{takes}: {'; '.join(differing)}. Name the same choices in both.")
        if settings.arrays:
            config["data"] |= self._own_data(settings.arrays, about["classes"], config["data"])
        whole |= config | {"federation": None, "callbacks": {}, "logger": {}}
        cfg = OmegaConf.create(whole, flags={"allow_objects": True})
        cfg.client_store.folder = str(folder / "clients")
        if settings.data_dir is not None and not settings.arrays and "data_dir" in cfg.data.dataset:
            cfg.data.dataset.data_dir = settings.data_dir
        return cfg

    def _own_data(self, path: str, classes: Sequence[str] | None, data: About) -> About:
        """The entries of ``data`` that load and deal the site's own samples."""
        dealt = {"_target_": f"{__name__}.deal", "_partial_": True, "clients": self.clients}
        return {
            "_target_": f"{FederatedDataModule.__module__}.FederatedDataModule",
            "dataset": partial(own_samples, path, classes, data.get("standardize")),
            "partitioner": dealt | {"by": data["partitioner"]},
        }

    def fit(self, about: About, message: bytes) -> About:
        """Trains some of its clients, from the states that the server considers valid.

        Deletes older ones.
        """
        clients = about["clients"]
        if not set(clients) <= set(self.clients) or len(set(clients)) < len(clients):
            raise Refusal(
                f"{self.name} holds the clients {self.clients}, and the server asked for {clients}."
            )
        download = unpack_download(message)
        self._refuse_other_download(download)
        self._restore(clients, about["states"])
        uploads: list[dict[str, Any]] = []
        self.end.fit(download, np.array(clients, dtype=np.int64), uploads.append)
        return {"uploads": uploads, "states": self._written(clients)}

    def _refuse_other_download(self, download: Download) -> None:
        """Raises MessageError for another model, and SettingError for numbers that no run of these
        clients has.
        """
        refuse_other(
            "the server's model", download.broadcast_model, self.end.module.travelling_state()
        )
        validated("the server's seed", download.seed, Whole)
        validated("the server's learning rate", download.lr, Weight)
        validated("the server's round", download.round_index, Whole)

    def _restore(self, clients: list[int], states: About) -> None:
        """Goes back to the first of these versions of each client's state.

        Deletes the versions that the server does not name.

        Args:
            states: name of the state → versions of each client.
        """
        stores = self.end.stores
        if states.keys() != stores.names:
            raise Refusal(
                f"{self.name} has the states {sorted(stores.names)}, and the server asked for"
                f" {[*states]}."
            )
        known: dict[Key, list[int]] = {}
        for name, of_clients in states.items():
            for client, versions in zip(clients, of_clients, strict=True):
                known[name, client] = validated("a state's versions", versions, list[int])
        for key, versions in known.items():
            written = stores.files.path(key, 0).parent.glob(f"{key[1]}-*.bin")
            for path in {*written} - {stores.files.path(key, version) for version in versions}:
                path.unlink()
        valid = {key: versions[0] for key, versions in known.items() if versions[0] != NONE}
        stores.restore(valid)

    def reply(self, about: About, message: bytes) -> About:
        """Gives its clients the server's reply to the last round."""
        self.end.reply(message)
        return {"states": self._written(about["clients"])}

    def _written(self, clients: Sequence[int]) -> About:
        """The versions of these clients' states, after their files have reached the disk."""
        stores = self.end.stores
        stores.state_dict()  # waits for the disk
        return {name: stores.versions(name, clients) for name in stores.names}


def without_dataset(data: About) -> About:
    """The settings of data that do not depend on the data set."""
    known = signature(FederatedDataModule).parameters.keys() - {"dataset"}
    return {key: value for key, value in data.items() if key in known}


def deal(
    labels: np.ndarray,
    num_clients: int,
    *,
    seed: int,
    groups: np.ndarray | None = None,
    clients: Sequence[int],
    by: Partitioner,
) -> Partition:
    """Deals a site's own data to its own clients, by the run's partition.

    The other clients have no data here.
    """
    owner_n = np.zeros(len(labels), np.int64)
    if len(clients) > 1:
        owner_n = by(labels, len(clients), seed=seed, groups=groups).owners(len(labels))
    return Partition.from_owners(np.array([*clients, -1])[owner_n], num_clients)


def own_samples(
    path: str, classes: Sequence[str] | None, standardize: bool | None
) -> FederatedDataset:
    """The samples in a site's ``.npz``, with labels numbered like the run's ``classes``; None: the
    task has no classes.

    Raises Refusal if the file has a class that the run does not know, or float vectors that need a
    common mean.
    """
    dataset = read_arrays(path, TEST)
    if standardize and dataset.train.x.dtype.kind == "f":
        raise Refusal(
            "data.standardize=true needs the mean of all samples, which no site knows: set it to"
            " false."
        )
    if classes is None or dataset.class_names is None:
        return dataset
    unknown = sorted(set(dataset.class_names) - set(classes))
    if unknown:
        raise Refusal(
            f"{dataset.name} has the class {unknown[0]}, and the run's are {', '.join(classes)}."
        )
    number = np.array([list(classes).index(name) for name in dataset.class_names])
    return replace(
        dataset,
        train=replace(dataset.train, y=number[dataset.train.y]),
        test=replace(dataset.test, y=number[dataset.test.y]),
        num_classes=len(classes),
        class_names=tuple(classes),
    )
