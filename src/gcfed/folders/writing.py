"""What a run writes to its folder at its beginning, and the global model at its end."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from numpy import ndarray
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save
from torch import nn

from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.distances import FEATURE_SKEW, label_skew
from gcfed.folders.folder import CONFIG, EXPORT, METRICS
from gcfed.models.adapters import save_adapters
from gcfed.utils.files import replacing, write_text


@dataclass(frozen=True)
class Holdings:
    """What the clients hold before attacks change labels."""

    counts_NC: ndarray | None  # samples of each class at each client; None if they are not known
    skew: Mapping[str, float]  # the distances between clients that can be measured


def begin(
    cfg: DictConfig, folder: Path, data: FederatedDataModule, *, known: bool, resumed: bool
) -> Holdings:
    """Writes the config, below the command that started the run, and which client holds which
    sample.

    Args:
        known: whether the server knows the clients' data.
        resumed: whether the run continues after a checkpoint.
    """
    write_text(folder / CONFIG, f"# {_origin()}\n{OmegaConf.to_yaml(cfg, resolve=True)}")
    if known:
        holdings = {"indices": data.partition.indices, "offsets": data.partition.offsets}
        _save_arrays(folder / "partition.npz", holdings)
    if data.scaling:
        _save_arrays(folder / "scaling.npz", data.scaling)
    if not resumed:
        # rounds before the first checkpoint are trained again
        (folder / METRICS).unlink(missing_ok=True)
    return _holdings(data) if known else Holdings(None, {})


def _holdings(data: FederatedDataModule) -> Holdings:
    counts_NC = None
    skew: dict[str, float] = {}
    if data.labels.dtype.kind == "i":
        counts_NC = data.partition.label_counts(data.labels, data.num_classes)
        skew |= label_skew(counts_NC)
    distance = data.feature_distance()
    if distance is not None:
        skew[FEATURE_SKEW] = distance
    return Holdings(counts_NC, skew)


def _origin() -> str:
    """How the run was started."""
    if HydraConfig.initialized():
        return f"python src/train.py {shlex.join(HydraConfig.get().overrides.task)}"
    return "made from Python"


def _save_arrays(path: Path, arrays: Mapping[str, ndarray]) -> None:
    with replacing(path) as temporary:
        np.savez(temporary, **arrays)  # type: ignore[arg-type]


def export(folder: Path, net: nn.Module, round_number: int, data: FederatedDataModule) -> None:
    """Writes the global model after this round, and its adapters if it has some.

    Args:
        data: has the means and deviations that scale its inputs, and the names of its classes.
    """
    state = {}
    for name, t in net.state_dict().items():
        if isinstance(t, torch.Tensor):  # a module's extra state may be anything
            # copied, because safetensors refuses a weight that two modules share
            state[name] = t.to("cpu", copy=True, memory_format=torch.contiguous_format)
    metadata = {"round": str(round_number)}
    with replacing(folder / EXPORT) as temporary:
        of_data = {
            "scaling": json.dumps(data.scaling_of_inputs),
            "classes": json.dumps(data.class_names),
        }
        temporary.write_bytes(save(state, metadata=metadata | of_data))
    save_adapters(net, folder, metadata)
