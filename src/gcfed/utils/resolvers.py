"""OmegaConf resolvers of the configs, and the folders of the configs and the project."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gcfed.utils.machine import cores, in_sweep, launched

_CLONE = Path(__file__).resolve().parents[3]
_PACKAGED = Path(__file__).resolve().parents[1] / "configs"  # in a wheel

#: The folder of the configs.
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else _CLONE / "configs"
#: The folder of data and runs: the clone, or the working folder of an installed command.
ROOT = Path.cwd() if _PACKAGED.is_dir() else _CLONE


def all_devices(accelerator: str) -> int:
    """Processes per node of ``trainer=ddp``: those of the launcher, else one per GPU, or one per
    core of a CPU.
    """
    if found := launched():
        return found[2]
    import torch

    gpus = torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 0
    return gpus or cores()


def last_layer(hidden: Any) -> str | None:
    """The name of the last linear layer of a network with these hidden widths; None for other
    networks.
    """
    if hidden is None or isinstance(hidden, float | str):  # the model refuses other types
        return None
    return "fc2" if isinstance(hidden, int) else f"fc{len(hidden) + 1}"


def method_name(algorithm: str, gc: str) -> str:
    """The method in the name of a run's folder: ``gcfed``, ``scaffold``, ``scaffold_gcfed``, or
    ``fedavg_local``.
    """
    plain = "fedavg" if algorithm == "gcfed" else algorithm
    return (
        plain
        if gc == "none"
        else "gcfed"
        if (plain, gc) == ("fedavg", "gcfed")
        else f"{plain}_{gc}"
    )


def sweep_name() -> str | None:
    """The name of the folder of the sweep or search whose job this is; None for a single run."""
    return Path(HydraConfig.get().sweep.dir).name if in_sweep() else None


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "all_devices": all_devices,
    "basename": lambda path: Path(path).name,
    "class_name": lambda target: str(target).rpartition(".")[2],  # Net of mynet.Net
    "last_layer": last_layer,
    "method_name": method_name,
    # the clients that follow from a list of data sets
    "length": lambda values, times=1: len(values) * times,
    "nodes": lambda: (launched() or ("", 1, 1))[1],  # on which a launcher started this run
    "project_root": lambda: str(ROOT),
    # flowers of ../flowers/
    "stem": lambda path, default: (Path(str(path)).resolve().stem if path else "") or default,
    "sweep_name": sweep_name,
    "task_of": lambda yes, task="SquaredError": (
        f"gcfed.tasks.{task if yes is True else 'Classification'}"
    ),
}
register = OmegaConf.register_new_resolver
for _name, _resolver in _RESOLVERS.items():
    register(_name, _resolver, replace=True)
