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
        settings = leaves(cfg)
        checksums = fingerprint(data)
        self.about = {
            "identity": digest(settings),
            "setting": digest(settings, without="seed"),
            "data": digest(checksums),
        }
        self.content: dict[str, Any] = {"leaves": settings, "checksums": checksums, **self.about}

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
        parts[f"{name} samples"] = checksum(split.x)
        parts[f"{name} labels"] = checksum(split.y)
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
    if cfg.ckpt_path is None:
        return None
    if cfg.ckpt_path == "last":
        return _last_checkpoint(folder)
    path = Path(cfg.ckpt_path)
    if not path.is_file():
        raise _no_such_file(path)
    return path


def _last_checkpoint(folder: Path) -> Path | None:
    path = folder / CHECKPOINT
    if path.is_file():
        return path
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


def _no_such_file(path: str | Path) -> FileNotFoundError:
    return FileNotFoundError(f"ckpt_path={path}: there is no such file. Set <run>/{CHECKPOINT}.")


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
    _check_record(checkpoint["gcfed"], record.content, path)
    rounds = int(checkpoint["global_step"])
    if rounds > cfg.rounds:
        raise ValueError(f"rounds={cfg.rounds}: {path} has {rounds} already. Set as many or more.")
    if leads() and not loop.transport.remote:
        loop.stores.check(checkpoint["callbacks"][loop.state_key]["stores"])
    log.info("resuming %s after round %d of %d", cfg.paths.output_dir, rounds, cfg.rounds)
    return rounds


def _check_record(there: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """Raises ValueError if a checkpoint's record has other settings or data than this run's."""
    if there["identity"] != here["identity"]:
        raise ValueError(
            f"ckpt_path={path} belongs to another run:"
            f" {differences(there['leaves'], here['leaves'])}. Repeat that run's overrides, or"
            " start anew without ckpt_path."
        )
    changed = []
    for name, checksum_here in here["checksums"].items():
        if there["checksums"].get(name) != checksum_here:
            changed.append(name)
    if changed:
        raise ValueError(
            f"ckpt_path={path}: the data have changed since: {', '.join(changed)}. "
            "Put the old files back, or start anew without ckpt_path."
        )


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of this project. It calls nothing that the file names.

    Raises FileNotFoundError if the file does not exist; ValueError if it is damaged, or no
    checkpoint of this project.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
            damaged = archive.testzip()
            if damaged:
                raise ValueError(f"the checksum of {damaged} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not {"state_dict", "global_step", "gcfed"} <= checkpoint.keys():
            raise ValueError("gcfed did not write it")
    except FileNotFoundError:
        raise _no_such_file(path) from None
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
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
            return tensors, int(about.get("round", 0))
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"ckpt_path={path} is damaged, or no model of this project: {error}"
        ) from error


def net_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The global network's tensors, by name."""
    tensors = {}
    for name, value in checkpoint["state_dict"].items():
        if name.startswith("net."):
            tensors[name.removeprefix("net.")] = value
    return tensors


def fitting(module: FederatedModule, theirs: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns ``theirs``, a file's tensors.

    Raises ValueError if names or shapes differ from the network's.
    """
    odd = differences(_shapes(theirs), _shapes(module.net.state_dict()), most=4)
    if odd:
        raise ValueError(
            f"ckpt_path={path} holds another model than {type(module.net).__name__}: {odd}. "
            "Set model=… and data=… as in the run that wrote it."
        )
    return theirs


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    # a module's extra state may be no tensor
    return {name: tuple(t.shape) for name, t in state.items() if isinstance(t, Tensor)}
