"""Reads checkpoints, and refuses those of another run, model or data set."""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gcfed.callbacks.after_round import why_stopped
from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.module import FederatedModule
from gcfed.runs.folder import CHECKPOINT, EXPORT
from gcfed.runs.identity import differences, digest, leaves
from gcfed.utils.machine import in_sweep, leads

log = logging.getLogger(__name__)


class RunRecord(Callback):
    """Writes into each checkpoint the settings that identify its run and the checksums of its data.

    ``about`` has their digests, for ``summary.json``.
    """

    def __init__(self, cfg: DictConfig, data: FederatedDataModule) -> None:
        counted, checksums = leaves(cfg), fingerprint(data)
        self.about = {"identity": digest(counted), "setting": digest(counted, without="seed")}
        self.about["data"] = digest(checksums)
        self.content: dict[str, Any] = {"leaves": counted, "checksums": checksums, **self.about}

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """A resumed run that early stopping has ended trains no further round."""
        trainer.should_stop = trainer.should_stop or bool(why_stopped(trainer.callbacks))  # type: ignore[attr-defined]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["gcfed"] = self.content


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


def checkpoint_of(cfg: DictConfig, folder: Path) -> Path | None:
    """The checkpoint to continue from; None to start anew.

    ``ckpt_path=last`` is ``last.ckpt`` in the run's folder.
    """
    path = folder / CHECKPOINT if cfg.ckpt_path == "last" else cfg.ckpt_path and Path(cfg.ckpt_path)
    if cfg.ckpt_path == "last" and not path.is_file():
        if not in_sweep():
            raise FileNotFoundError(
                "ckpt_path=last: no earlier run with these settings has a checkpoint (its folder"
                f" would be {folder}). Repeat the overrides of the run to continue, or set"
                f" ckpt_path=<run>/{CHECKPOINT}."
            )
        log.warning(
            "ckpt_path=last: this job of the sweep has no checkpoint yet. It starts in %s", folder
        )
        return None
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"ckpt_path={path}: there is no such file. Set <run>/{CHECKPOINT}.")
    return path


def resume(
    cfg: DictConfig,
    path: Path | None,
    record: RunRecord,
    module: FederatedModule,
    loop: FederatedLoop,
) -> int:
    """The number of rounds in the checkpoint from which this run continues; 0 if it starts anew.

    Raises ValueError if it belongs to another model, run or data set, or has more rounds than this
    run.
    """
    if path is None:
        return 0
    checkpoint = load_checkpoint(path)
    fitting(module, net_of(checkpoint), path)
    there, here, rounds = checkpoint["gcfed"], record.content, int(checkpoint["global_step"])
    if there["identity"] != here["identity"]:
        raise ValueError(
            f"ckpt_path={path} belongs to another run:"
            f" {differences(there['leaves'], here['leaves'])}. Repeat that run's overrides, or"
            " start anew without ckpt_path."
        )
    if changed := [
        name
        for name, checksum in here["checksums"].items()
        if there["checksums"].get(name) != checksum
    ]:
        raise ValueError(
            f"ckpt_path={path}: the data have changed since: {', '.join(changed)}. "
            "Put the old files back, or start anew without ckpt_path."
        )
    if rounds > cfg.rounds:
        raise ValueError(f"rounds={cfg.rounds}: {path} has {rounds} already. Set as many or more.")
    if leads() and not loop.transport.remote:
        loop.stores.check(checkpoint["callbacks"][loop.state_key]["stores"])
    log.info("resuming %s after round %d of %d", cfg.paths.output_dir, rounds, cfg.rounds)
    return rounds


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of this project. Nothing in it is called.

    Raises FileNotFoundError if it does not exist; ValueError if it is damaged, or no checkpoint of
    this project.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not {"state_dict", "global_step", "gcfed"} <= checkpoint.keys():
            raise ValueError("gcfed did not write it")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"ckpt_path={path}: there is no such file. Set <run>/{CHECKPOINT}."
        ) from None
    except Exception as error:
        raise ValueError(
            f"ckpt_path={path} is damaged, or no checkpoint of this project: {error}"
        ) from error
    return checkpoint


def load_weights(path: Any) -> tuple[dict[str, Tensor], int]:
    """The global network's tensors in a checkpoint or an exported model, and the number of its
    rounds.
    """
    if path is None or Path(path).suffix != EXPORT.suffix:
        checkpoint = load_checkpoint(str(path))
        return net_of(checkpoint), checkpoint["global_step"]
    try:
        with safe_open(path, "pt") as file:
            rounds = int((file.metadata() or {}).get("round", 0))
            return {name: file.get_tensor(name) for name in file.keys()}, rounds  # noqa: SIM118  (no dict)
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"ckpt_path={path} is damaged, or no model of this project: {error}"
        ) from error


def net_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        k.removeprefix("net."): v
        for k, v in checkpoint["state_dict"].items()
        if k.startswith("net.")
    }


def fitting(module: FederatedModule, theirs: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns ``theirs``, a file's tensors.

    Raises ValueError if names or shapes differ from the network's.
    """
    states = theirs, module.net.state_dict()  # a module's extra state may be no tensor
    there, here = (
        {k: tuple(v.shape) for k, v in state.items() if isinstance(v, Tensor)} for state in states
    )
    if odd := differences(there, here, most=4):
        raise ValueError(
            f"ckpt_path={path} holds another model than {type(module.net).__name__}: {odd}. "
            "Set model=… and data=… as in the run that wrote it."
        )
    return theirs
