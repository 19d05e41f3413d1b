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
from gcfed.assemble import assemble
from gcfed.checkpoints.reading import fingerprint
from gcfed.data.base import FederatedDataset
from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.partition import Partition, Partitioner
from gcfed.data.sets.own import arrays as read_arrays
from gcfed.federated.engine.wire import ClientEnd, pack, unpack_download
from gcfed.federated.protocol.checks import refuse_other
from gcfed.runs.identity import digest
from gcfed.utils.checked import Whole, checked, validated
from gcfed.utils.compose import composed, shorthand
from gcfed.utils.files import in_words
from gcfed.utils.refusal import Refusal
from gcfed_sites.answers import NONE, About

#: The keys of a config that clients need.
OF_CLIENTS = (
    "data",
    "model",
    "client",
    "gc",
    "attack",
    "quantization",
    "metrics",
    "participation",
    "partition",
    "client_store",
    "task",
    "methods",
    "seed",
    "rounds",
    "eval_every",
    "precision",
    "precision_matmul",
    "channels_last",
    "tags",
    "name",
)
#: Names and folders, which may differ between machines.
OWN = re.compile(r"tags|name|data\.dataset\.data_dir|client_store\.folder|metrics\.\w+\.folder")
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

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings in a file; the defaults if there is none. An error names the key."""
        given: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
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
        self.name, self.settings, self.home = name, settings, home

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
            return pack({"failure": f"{type(error).__name__}: {in_words(error)}"})

    def configure(self, about: About, message: bytes) -> About:
        """Builds the clients of a run.

        Refuses another version of this project, and data that have changed.
        """
        if about["version"] != __version__:
            raise Refusal(
                f"the server has gcfed {about['version']}, and {self.name} has {__version__}."
            )
        if not re.fullmatch(r"[\w-]+", about["run"]):
            raise Refusal(f"the run {about['run']!r} has a name that cannot name a folder.")
        self.run, own = "", Settings.read(self.settings)
        vars(self).pop("end", None)  # frees its memory
        # it becomes part of a config
        share: list[int] = validated("share", about["share"], list[Whole])
        self.clients: list[int] = sorted({*(share if own.clients is None else own.clients)})
        folder = Path(own.states or self.home / "states") / about["run"]
        end = ClientEnd(self._config(own, folder, about), assemble, own.accelerator)
        end.stores.shared = True  # states are files, which this site's next process reads
        if end.data.num_clients != (n := about["num_clients"]) or not set(self.clients) <= set(
            range(n)
        ):
            raise Refusal(
                f"{self.name} holds the clients {self.clients}, and the run has {n}, from 0 on."
            )
        path, checksum = folder / "data.txt", digest(fingerprint(end.data))
        if about["resumed"] and path.is_file() and path.read_text() != checksum:
            raise Refusal(
                f"the data of {self.name} have changed since the run began: restore them."
            )
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(checksum)
        self.end, self.run = end, about["run"]
        sizes = end.data.sizes(np.array(self.clients, dtype=np.int64)).tolist()
        return {"clients": self.clients, "sizes": sizes}

    def _config(self, own: Settings, folder: Path, about: About) -> DictConfig:
        """The site's own config with the server's numbers, for its own data and folders.

        Raises:
            ValueError: the configs differ in more than numbers; names the keys.
        """
        cfg: Any = (
            OmegaConf.load(own.config) if own.config else composed(shorthand(own.overrides or ()))
        )
        cfg.paths.output_dir = str(folder)
        whole: Any = OmegaConf.to_container(cfg, resolve=True)
        config, sent = clients_config(whole), dict(about["config"])
        if own.arrays:  # they replace the run's data set
            known = signature(FederatedDataModule).parameters.keys() - {"dataset"}
            for each in (config, sent):
                each["data"] = {key: value for key, value in each["data"].items() if key in known}
        odd: list[str] = []
        config = adopted(config, sent, odd)
        if odd:
            takes = (
                f"{self.name} takes only numbers from the server, and its gcfed.yaml has"
                " another run"
            )
            raise Refusal(f"{takes}: {'; '.join(odd)}. Name the same choices in both.")
        if own.arrays:
            data = config["data"]
            means = {
                key: value for key, value in about["transform"].items() if key in data["transform"]
            }
            data["transform"] = adopted(data["transform"], data["transform"] | means, odd)
            load = partial(own_samples, own.arrays, about["classes"], data.get("standardize"))
            dealt = {"_target_": f"{__name__}.deal", "_partial_": True, "clients": self.clients}
            data |= {
                "_target_": f"{FederatedDataModule.__module__}.FederatedDataModule",
                "dataset": load,
                "partitioner": dealt | {"by": data["partitioner"]},
            }
        whole |= config | {"federation": None, "callbacks": {}, "logger": {}}
        cfg = OmegaConf.create(whole, flags={"allow_objects": True})
        cfg.client_store.folder = str(folder / "clients")
        if own.data_dir is not None and not own.arrays and "data_dir" in cfg.data.dataset:
            cfg.data.dataset.data_dir = own.data_dir
        return cfg

    def fit(self, about: About, message: bytes) -> About:
        """Trains some of its clients, from the states that the server considers valid.

        Deletes older ones.
        """
        clients, states, stores = about["clients"], about["states"], self.end.stores
        if not set(clients) <= set(self.clients):
            raise Refusal(
                f"{self.name} holds the clients {self.clients}, and asked were {clients}."
            )
        download = unpack_download(message)
        refuse_other("the server's model", download.model, self.end.module.broadcast_state())
        if states.keys() != stores.names:
            raise Refusal(
                f"{self.name} has the states {sorted(stores.names)}, and asked were {[*states]}."
            )
        known = {
            (name, k): of
            for name, own in states.items()
            for k, of in zip(clients, own, strict=True)
        }
        for key, versions in known.items():  # the valid one first
            written = stores.path(key, 0).parent.glob(f"{key[1]}-*.bin")
            for path in {*written} - {stores.path(key, version) for version in versions}:
                path.unlink()
        stores.restore({key: versions[0] for key, versions in known.items() if versions[0] != NONE})
        uploads = [*self.end.fit(download, np.array(clients, dtype=np.int64))]
        return {"uploads": uploads, "states": self._written(clients)}

    def reply(self, about: About, message: bytes) -> About:
        """Gives its clients the server's reply to the last round."""
        self.end.reply(message)
        return {"states": self._written(about["clients"])}

    def _written(self, clients: Sequence[int]) -> About:
        """The versions of these clients' states, after their files have reached the disk."""
        stores = self.end.stores
        stores.state_dict()  # waits for the disk
        return {name: stores.versions(name, clients) for name in stores.names}


def clients_config(whole: Any) -> dict[str, Any]:
    """The part of a resolved config that clients need."""
    return {key: whole[key] for key in OF_CLIENTS if key in whole}


def adopted(own: Any, sent: Any, odd: list[str], key: str = "") -> Any:
    """A site's config with the server's numbers: integers, floats, booleans, and lists of them.

    So the server names no class, file or address. All other values stay as the site has them. Adds
    each other difference to ``odd``.
    """
    if OWN.fullmatch(key):
        return own
    if isinstance(own, dict) and isinstance(sent, dict):
        path = f"{key}." if key else ""
        odd += [
            f"{path}{name} is {str(sent[name])[:40]!r} there, absent here"
            for name in sorted(sent.keys() - own)
        ]
        return {
            name: adopted(value, sent.get(name), odd, f"{path}{name}")
            for name, value in own.items()
        }
    if _is_number(sent) and (own is None or _is_number(own)):
        return sent
    if own != sent:
        odd.append(f"{key} is {str(sent)[:40]!r} there, {str(own)[:40]!r} here")
    return own


def _is_number(value: Any) -> bool:
    return (
        all(map(_is_number, value)) if isinstance(value, list) else isinstance(value, int | float)
    )


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

    Raises:
        ValueError: the file has a class that the run does not know, or float vectors that need a
            common mean.
    """
    found = read_arrays(path, TEST)
    if standardize and found.train.x.dtype.kind == "f":
        raise Refusal(
            "data.standardize=true needs the mean of all samples, which no site knows: set it to"
            " false."
        )
    if classes is None or found.class_names is None:
        return found
    if unknown := sorted(set(found.class_names) - set(classes)):
        raise Refusal(
            f"{found.name} has the class {unknown[0]}, and the run's are {', '.join(classes)}."
        )
    number = np.array([list(classes).index(name) for name in found.class_names])
    train, test = (replace(split, y=number[split.y]) for split in (found.train, found.test))
    return replace(
        found, train=train, test=test, num_classes=len(classes), class_names=tuple(classes)
    )
