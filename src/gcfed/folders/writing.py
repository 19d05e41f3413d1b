"""What a run writes to its folder at its beginning and at its end."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from numpy import ndarray
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save
from torch import nn

from gcfed.data.datamodule import FederatedDataModule
from gcfed.folders.folder import CONFIG, EXPORT, METRICS
from gcfed.folders.reading import column, label_skew, read_metrics
from gcfed.folders.summary import print_summary, summary_of, write_summary
from gcfed.models.adapters import save_adapters
from gcfed.utils.files import replacing

log = logging.getLogger(__name__)


def begin(
    cfg: DictConfig, folder: Path, data: FederatedDataModule, *, known: bool, resumed: bool
) -> ndarray | None:
    """Writes the config, below the command that started the run, and which client holds which
    sample.

    Args:
        known: whether the server knows the clients' data.

    Returns the samples of each class at each client, [N, C], before attacks change labels; None if
    they are not known.
    """
    by_hydra = HydraConfig.initialized()
    origin = (
        f"python src/train.py {shlex.join(HydraConfig.get().overrides.task)}"
        if by_hydra
        else "made from Python"
    )
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(f"# {origin}\n{OmegaConf.to_yaml(cfg, resolve=True)}")
    held = {"indices": data.partition.indices, "offsets": data.partition.offsets} if known else {}
    for name, arrays in {"partition": held, "scaling": data.scaling}.items():
        if arrays:
            with replacing(folder / f"{name}.npz") as temporary:
                np.savez(temporary, **arrays)  # type: ignore[arg-type]
    if not resumed:
        # rounds before the first checkpoint are trained again
        (folder / METRICS).unlink(missing_ok=True)
    has_classes = data.labels.dtype.kind == "i"
    return (
        data.partition.label_counts(data.labels, data.num_classes)
        if known and has_classes
        else None
    )


def finish(
    cfg: DictConfig,
    folder: Path,
    net: nn.Module,
    trainer: Trainer,
    data: FederatedDataModule,
    held_NC: ndarray | None,
    about: Mapping[str, str],
    stopped: str,
    result: str,
) -> None:
    """Writes the global model, the summary and pictures. Prints the summary.

    A run that was killed between its last checkpoint and this function calls it when it is resumed.

    Args:
        held_NC: what :func:`begin` returned.
        about: the hashes that identify the run and its data.
        stopped: why early stopping has ended the run, or "".
        result: the column that the methods declare as their result, or "".
    """
    state = {  # copied, because safetensors refuses a weight that two modules share
        name: t.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in net.state_dict().items()
        if isinstance(t, torch.Tensor)  # a module's extra state may be anything
    }
    tag = {"round": str(trainer.global_step)}
    with replacing(folder / EXPORT) as temporary:
        temporary.write_bytes(save(state, metadata=tag))
    save_adapters(net, folder, tag)
    metrics = read_metrics(folder / METRICS)
    if trainer.global_step not in column(metrics, "test/loss").index:
        return  # no logger has written rows, or the last round has no test
    skew = {} if held_NC is None else label_skew(held_NC)
    summary = summary_of(metrics, cfg.targets, trainer.world_size, result) | skew
    write_summary(folder, summary, {**about} | ({"stopped": stopped[:100]} if stopped else {}))
    if cfg.extras.figures:
        from gcfed.plots.pictures import draw_partition, plot_curves  # matplotlib

        plot_curves(metrics, folder / "curves.png")
        if held_NC is not None and not (folder / "partition.png").is_file():
            draw_partition(data, held_NC, folder / "partition.png")
    if log.isEnabledFor(logging.WARNING):
        print_summary(summary, metrics, folder, stopped)
