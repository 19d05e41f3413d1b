"""What each checkpoint says of its run: the settings, the data, the processes and the versions."""

import logging
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig

from gcfed import __version__
from gcfed.callbacks.after_round import why_stopped
from gcfed.data.datamodule import FederatedDataModule
from gcfed.folders.identity import digest, leaves

log = logging.getLogger(__name__)
VERSION = re.compile(r"[\w.+ -]{1,100}")


class RunRecord(Callback):
    """Writes into each checkpoint the settings that identify its run; the checksums of its data and
    of the file of ``model.start``; the scaling and the classes of the data; the number of processes
    and the version of this project that trained its rounds.

    ``about`` has digests of the settings and the checksums, for ``summary.json``.
    """

    def __init__(self, cfg: DictConfig, data: FederatedDataModule) -> None:
        counted = leaves(cfg)
        checksums = fingerprint(data)
        start = cfg.model.get("start")
        if start is not None:
            checksums["model.start"] = checksum(np.fromfile(start, np.uint8))
        self.about = {"identity": digest(counted), "setting": digest(counted, without="seed")}
        self.about["data"] = digest(checksums)
        self.content: dict[str, Any] = {
            "leaves": counted,
            "checksums": checksums,
            "scaling": data.scaling_of_inputs,
            "classes": data.class_names,
            **self.about,
        }
        # a round → the number of processes from then on, until the next entry
        self.processes: dict[int, int] = {}
        # a round → the version from then on, likewise
        self.versions: dict[int, str] = {}

    def version(self, rounds: int) -> str:
        """The versions that trained the first ``rounds``, such as ``0.2.0``, in their order."""
        used = [version for first, version in self.versions.items() if first <= rounds]
        return ", ".join(dict.fromkeys(used))

    def restore(self, there: Mapping[str, Any], rounds: int) -> None:
        """Takes what the record of a checkpoint tells of its finished ``rounds``.

        Warns if another version trained these rounds.

        Raises ValueError if no run can have written it.
        """
        for first in (*there["processes"], *there["versions"]):
            if not (type(first) is int and 1 <= first <= rounds):
                raise ValueError(f"its record has the round {first!r}")
        for number in there["processes"].values():
            if not (type(number) is int and number >= 1):
                raise ValueError(f"its record has {number!r} processes")
        for version in there["versions"].values():
            if not (isinstance(version, str) and VERSION.fullmatch(version)):
                raise ValueError(f"its record has the version {version!r}")
        self.processes = dict(sorted(there["processes"].items()))
        self.versions = dict(sorted(there["versions"].items()))
        before = self.version(rounds)
        if before != __version__:
            log.warning(
                "version %s trained the first %d rounds of this run, and %s trains the others."
                " CHANGELOG.md lists the numbers that change between versions",
                before,
                rounds,
                __version__,
            )

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Notes the processes and the version of the rounds that follow.

        A resumed run that early stopping has ended trains no further round.
        """
        self.processes[trainer.global_step + 1] = trainer.world_size
        self.versions[trainer.global_step + 1] = __version__
        trainer.should_stop = trainer.should_stop or bool(why_stopped(trainer.callbacks))  # type: ignore[attr-defined]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        record = {"processes": self.processes, "versions": self.versions}
        checkpoint["gcfed"] = {**self.content, **record}


def fingerprint(data: FederatedDataModule) -> dict[str, str]:
    """Part of the data → checksum: the samples and labels of each split, and which client holds
    which sample.

    The samples are those before standardisation, because its last bits differ between machines.
    """
    parts = {"clients": checksum(data.partition.indices, data.partition.offsets)}
    for name, split in data.splits.items():
        parts |= {f"{name} samples": checksum(split.x), f"{name} labels": checksum(split.y)}
    return parts


def checksum(*arrays: np.ndarray) -> str:
    """CRC-32 of types, shapes and bytes."""
    value = 0
    for array in arrays:
        value = zlib.crc32(f"{array.dtype} {array.shape}".encode(), value)
        value = zlib.crc32(np.ascontiguousarray(array).data, value)
    return f"{value:08x}"
