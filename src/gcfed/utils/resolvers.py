"""OmegaConf resolvers of the configs, and where these and the project lie."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import omegaconf
from omegaconf import OmegaConf

from gcfed.utils.machine import cores, nodes, one_of_several

_CLONE = Path(__file__).resolve().parents[3]
_PACKAGED = Path(__file__).resolve().parents[1] / "configs"

INSTALLED = _PACKAGED.is_dir()
"""Whether the package was installed from a wheel, which has the configs in it."""
CONFIGS = _PACKAGED if INSTALLED else _CLONE / "configs"
"""The folder of the configs: in the package where it was installed, else beside ``src/``."""
ROOT = Path.cwd() if INSTALLED else _CLONE
"""The folder below which data are read and runs are written: the clone, or where an installed command is called."""


def command(name: str) -> str:
    """How the user calls ``train``, ``eval`` or ``report``."""
    return f"gcfed-{name}" if INSTALLED or Path(sys.argv[0]).name.startswith("gcfed-") else f"python src/{name}.py"


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this project."""
    return f"pip install 'gcfed[{extra}]'" if INSTALLED else f".venv/bin/uv pip install -e '.[{extra}]'"


def all_devices(accelerator: str) -> int:
    """Processes a node of ``trainer=ddp``: those that a launcher made, else one a GPU, or one a core of a CPU."""
    if one_of_several():
        return int(os.environ.get("LOCAL_WORLD_SIZE") or int(os.environ["SLURM_NTASKS"]) // nodes())
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return cores()


def last_layer(hidden: Any) -> str | None:
    """The name of the last linear layer behind hidden ones of these widths; None for a model without such widths."""
    if hidden is None or isinstance(hidden, float | str):  # the model refuses other types
        return None
    return "fc2" if isinstance(hidden, int) else f"fc{len(hidden) + 1}"


def method_name(algorithm: str, gc: str) -> str:
    """What the folder of a run is called: ``gcfed``, ``scaffold``, ``scaffold_gcfed``, or ``fedavg_local``."""
    plain = "fedavg" if algorithm == "gcfed" else algorithm
    return plain if gc == "none" else "gcfed" if (plain, gc) == ("fedavg", "gcfed") else f"{plain}_{gc}"


def stem(path: object, default: str) -> str:
    """What a run on a file, a folder or a module is called: ``flowers`` for ``../flowers/`` or ``flowers.npz``."""
    return (Path(str(path)).resolve().stem if path else "") or default


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "all_devices": all_devices,
    "class_name": lambda target: str(target).rpartition(".")[2],  # Net of mynet.Net
    "command": command,
    "last_layer": last_layer,
    "method_name": method_name,
    "length": lambda values, times=1: len(values) * times,  # the clients that follow from a list of data sets
    "nodes": nodes,
    "project_root": lambda: str(ROOT),
    "stem": stem,
    "task_of": lambda regression: f"gcfed.tasks.{'SquaredError' if regression is True else 'Classification'}",
}
# OmegaConf 2.4 renames it; the register_resolver of 2.3 is an older function.
register: Any = OmegaConf.register_new_resolver if omegaconf.__version__ < "2.4" else OmegaConf.register_resolver
for _name, _resolver in _RESOLVERS.items():
    register(_name, _resolver, replace=True)
