"""Checkpoints come back from the disk: they say what run and model they are of, and are refused to others."""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.module import FederatedModule
from gcfed.runs.folder import BEST, CHECKPOINT, EXPORT, METRICS, PREVIOUS
from gcfed.runs.identity import differences, digest, leaves
from gcfed.runs.reading import column, read_metrics
from gcfed.utils.machine import in_sweep

log = logging.getLogger(__name__)
NEEDED = {"state_dict", "global_step", "callbacks", "loops", "optimizer_states", "lr_schedulers", "gcfed"}


class RunRecord(Callback):
    """Writes what the run is into its checkpoints, as plain Python that is compared and never built.

    ``about`` says it in short: its identity, its setting, and what its data are, whose files can change meanwhile.
    """

    def __init__(self, cfg: DictConfig, data: FederatedDataModule) -> None:
        counted, checksums = leaves(cfg), fingerprint(data)
        self.about = {
            "identity": digest(counted), "setting": digest(counted, without="seed"), "data": digest(checksums),
            "classes": class_checksum(data),
        }  # fmt: skip
        self.content: dict[str, Any] = {"leaves": counted, "checksums": checksums, **self.about}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["gcfed"] = self.content


def fingerprint(data: FederatedDataModule) -> dict[str, str]:
    """Part of the data → checksum: the samples and labels of each split, and which client holds which sample.

    Samples count as their files have them: once standardised, they differ between machines in their last bits.
    """
    parts = {"clients": checksum(data.partition.indices, data.partition.offsets)}
    for name, split in data.splits.items():
        parts |= {f"{name} samples": checksum(split.x), f"{name} labels": checksum(split.y)}
    return parts


def checksum(*arrays: np.ndarray) -> str:
    """CRC-32 of types, shapes and bytes, by blocks of 16 MiB, since arrays may be memory maps: 0.1 s for CIFAR-10."""
    value = 0
    for array in arrays:
        value = zlib.crc32(f"{array.dtype} {array.shape}".encode(), value)
        rows = max(1, 2**24 // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            value = zlib.crc32(np.ascontiguousarray(array[start : start + rows]).data, value)
    return f"{value:08x}"


def class_checksum(data: FederatedDataModule) -> str:
    """Eight hexadecimal digits of how many samples of each class the whole set has: equal for all seeds."""
    sizes = [np.append(np.bincount(split.classes), len(split)) for split in (data.dataset.train, data.dataset.test)]
    return f"{zlib.crc32(np.concatenate(sizes).tobytes()):08x}"


def resume_from(ckpt_path: Any, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to continue from, with its path; ``last`` is that of the run's own folder, which the config chose.

    In place of a damaged ``last.ckpt`` it is the one before it.

    Raises:
        ValueError: it is none that a run goes on from.
        FileNotFoundError: it is not there.
    """
    own = folder / CHECKPOINT
    if ckpt_path is None:
        return None
    if ckpt_path == "last" and not own.is_file():
        if in_sweep():
            log.warning("ckpt_path=last: this job of the sweep has not begun before; it starts in %s", folder)
            return None
        raise FileNotFoundError(
            f"ckpt_path=last: no earlier run with these settings has a checkpoint (this one would write to {folder}). "
            f"Repeat the overrides of the run to continue, or give ckpt_path=<run>/{CHECKPOINT}."
        )
    wanted = own if ckpt_path == "last" else ckpt_path
    path = Path(str(wanted))
    if path.name == BEST:  # clients' states are kept for the last two checkpoints only
        raise ValueError(f"ckpt_path={path} is to be tested, by src/eval.py: {CHECKPOINT.name} goes on.")
    try:
        return path, load_checkpoint(wanted)
    except ValueError as error:
        previous = path.with_name(PREVIOUS.name)
        if path.name != CHECKPOINT.name or not previous.is_file():
            raise
        try:
            found = load_checkpoint(previous)
        except ValueError as another:
            raise ValueError(f"{error}; {another}. Start anew without ckpt_path.") from another
        log.warning("%s. The run goes on from %s, the checkpoint before it.", error, previous)
        return previous, found


def load_checkpoint(path: Any) -> dict[str, Any]:
    """Reads a checkpoint of this project whole.

    Raises:
        ValueError: the file is damaged, none of ours, or holds weights alone; names it.
        FileNotFoundError: it is not there.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"ckpt_path={path} names no checkpoint: give ckpt_path=<run>/{CHECKPOINT}.")
    path = Path(path)
    if path.suffix == EXPORT.suffix:
        raise ValueError(f"ckpt_path={path} holds weights alone, which model.start takes: give <run>/{CHECKPOINT}.")
    if not path.is_file():
        raise FileNotFoundError(f"ckpt_path={path}: there is no such file. Checkpoints are <run>/{CHECKPOINT}.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes the checksums, and reads past them
            if sum(item.file_size for item in archive.infolist()) > path.stat().st_size:
                raise ValueError("it is compressed, as no checkpoint is, and could unpack to any size")
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} is damaged, or no checkpoint of this project: {error}") from error
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= NEEDED:
        raise ValueError(f"{path} was not written by this project, whose checkpoints hold {', '.join(sorted(NEEDED))}.")
    return checkpoint


def load_weights(path: Any) -> tuple[dict[str, Tensor], int, Mapping[str, Any]]:
    """The global network's tensors in a checkpoint or in an exported model, how many rounds they were trained, and the
    checkpoint's record of its run.

    Raises:
        ValueError, FileNotFoundError: as :func:`load_checkpoint`.
    """
    if not (isinstance(path, str | Path) and Path(path).suffix == EXPORT.suffix and Path(path).is_file()):
        checkpoint = load_checkpoint(path)
        return net_of(checkpoint), checkpoint["global_step"], checkpoint["gcfed"]
    try:
        with safe_open(path, "pt") as file:
            rounds = int((file.metadata() or {}).get("round", 0))
            return {name: file.get_tensor(name) for name in file.keys()}, rounds, {}  # noqa: SIM118  (no dict)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"ckpt_path={path} is damaged, or no model of this project: {error}") from error


def check_checkpoint(
    cfg: DictConfig, path: Path, checkpoint: Mapping[str, Any], record: RunRecord, module: FederatedModule
) -> int:
    """How many rounds the checkpoint has, from which this run goes on.

    Raises:
        ValueError: it is of another model, another run, other data or more rounds, or rows of the run are lost.
    """
    fitting(module, net_of(checkpoint), path)
    there, here, rounds = checkpoint["gcfed"], record.content, int(checkpoint["global_step"])
    if there["identity"] != here["identity"]:
        raise ValueError(
            f"ckpt_path={path} belongs to another run: {differences(there['leaves'], here['leaves'])}. "
            "Repeat that run's overrides, or start anew without ckpt_path."
        )
    check_data(path, there, here["checksums"], "start anew without ckpt_path.")
    if rounds > cfg.rounds:
        raise ValueError(f"rounds={cfg.rounds}: {path} has {rounds} already. Ask for as many or more.")
    folder = Path(cfg.paths.output_dir)
    if "csv" in (cfg.get("logger") or {}):
        check_rows(folder / METRICS, rounds, cfg.rounds)
    if rounds == cfg.rounds:
        log.info("%s has its %d rounds: nothing is left to train; rounds=<more> goes on", folder, rounds)
    else:
        log.info("resuming %s after round %d", folder, rounds)
    return rounds


def check_data(path: Path, record: Mapping[str, Any], checksums: Mapping[str, str], remedy: str) -> None:
    """Refuses data with other checksums, of :func:`fingerprint`, than the checkpoint's run had."""
    there = record.get("checksums", {})
    if changed := [name for name in checksums if there.get(name) != checksums[name]]:
        raise ValueError(
            f"ckpt_path={path}: the data have changed since: {', '.join(changed)}. Put the old files back, or {remedy}"
        )


def check_tests(path: Path, record: Mapping[str, Any], cfg: DictConfig, data: FederatedDataModule) -> None:
    """Refuses test and validation samples that are not those of the file's run, unless ``cfg`` asks for others."""
    data.setup()
    theirs, ours = (
        {key: value for key, value in counted.items() if key.startswith(("data.", "partition.", "seed"))}
        for counted in (record.get("leaves", {}), leaves(cfg))
    )
    if theirs == ours:
        tested = {name: value for name, value in fingerprint(data).items() if name.startswith(("test", "validation"))}
        check_data(path, record, tested, "choose others by data=… or data.<key>=….")


def check_rows(path: Path, rounds: int, last: int) -> None:
    """Refuses to continue a run whose ``metrics.csv`` lacks a finished round, or the test of the ``last``."""
    rows = read_metrics(path)
    if missing := [t for t in range(1, rounds + 1) if t not in rows.index]:
        raise ValueError(
            f"{path} lacks round {missing[0]}, but the checkpoint has finished {rounds}: put the file back, start anew "
            "without ckpt_path, or continue without the file by ~logger.csv."
        )
    if rounds == last and last not in column(rows, "test/loss").index:
        raise ValueError(f"rounds={last}: the checkpoint has them, the last without a test. Ask for more.")


def net_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    return {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items() if k.startswith("net.")}


def fitting(module: FederatedModule, theirs: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors of a file, to be loaded into the network of ``module``.

    Raises:
        ValueError: names or shapes differ: the file is of another model.
    """
    there, here = ({k: tuple(v.shape) for k, v in state.items()} for state in (theirs, module.net.state_dict()))
    if odd := differences(there, here, most=4):
        raise ValueError(
            f"ckpt_path={path} holds another model than {type(module.net).__name__}: {odd}. "
            "Set model=… and data=… as in the run that wrote it."
        )
    return theirs
