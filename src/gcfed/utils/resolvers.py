"""OmegaConf resolvers of the configs, and the folders of the configs and the project."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from hydra import __version__ as hydra_version
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gcfed.utils.machine import cores, in_sweep, launched

_CLONE = Path(__file__).resolve().parents[3]
_PACKAGED = Path(__file__).resolve().parents[1] / "configs"  # in a wheel

#: The folder of the configs.
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else _CLONE / "configs"
#: The folder of the data: the clone, or the working folder of an installed package.
ROOT = Path.cwd() if _PACKAGED.is_dir() else _CLONE


def runs_root(working: Path, root: Path) -> Path:
    """The folder that holds ``logs``: ``root`` for a command that starts within it, and the working
    folder elsewhere. So a project beside a clone keeps its own runs.
    """
    return root if working.is_relative_to(root) else working


#: The folder of all runs.
LOGS = runs_root(Path.cwd(), ROOT) / "logs"


def all_devices(accelerator: str) -> int:
    """Processes per node of ``trainer=ddp``: as many as the launcher has started. Without a
    launcher, one per GPU, or one per core of a CPU.
    """
    by_launcher = launched()
    if by_launcher is not None:
        _, _, processes = by_launcher
        return processes
    import torch

    gpus = torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 0
    return gpus or cores()


def nodes() -> int:
    """The number of nodes on which a launcher started this run; 1 without a launcher."""
    by_launcher = launched()
    if by_launcher is None:
        return 1
    _, machines, _ = by_launcher
    return machines


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
    if gc == "none":
        return plain
    if plain == "fedavg" and gc == "gcfed":
        return "gcfed"
    return f"{plain}_{gc}"


def stem(path: Any, default: str) -> str:
    """``flowers`` of ``../flowers/``, of ``flowers.csv``, or of ``.`` in the folder flowers."""
    if not path:
        return default
    return Path(str(path)).resolve().stem or default


def task_of(has_numbers: Any, task: str = "SquaredError") -> str:
    """The class of a data set's task: classification, unless its labels are numbers."""
    return f"gcfed.tasks.{task if has_numbers is True else 'Classification'}"


def sweep_name() -> str | None:
    """The name of the folder of the sweep or search whose job this is; None for a single run."""
    if not in_sweep():
        return None
    return Path(HydraConfig.get().sweep.dir).name


def _registering() -> Callable[..., None]:
    """OmegaConf's function that registers a resolver. Version 2.4 gives it the name of an older
    function, which cannot replace a resolver.
    """
    renamed: Callable[..., None] = OmegaConf.register_resolver
    if "replace" in signature(renamed).parameters:
        return renamed
    return OmegaConf.register_new_resolver


def base_of(version: str) -> dict[str, Any]:
    """The argument ``version_base`` of Hydra's functions for the behaviour of this version of
    Hydra: 1.3 needs it, and 1.4 warns of it.
    """
    major, minor = version.split(".")[:2]
    needs_base = (int(major), int(minor)) < (1, 4)
    return {"version_base": None} if needs_base else {}


#: Arguments of ``hydra.main`` and ``initialize_config_dir``.
VERSION_BASE = base_of(hydra_version)

register = _registering()
register("all_devices", all_devices, replace=True)
register("basename", lambda path: Path(path).name, replace=True)
register("class_name", lambda target: str(target).rpartition(".")[2], replace=True)
register("last_layer", last_layer, replace=True)
register("length", lambda values, times=1: len(values) * times, replace=True)
register("method_name", method_name, replace=True)
register("logs", lambda: str(LOGS), replace=True)
register("nodes", nodes, replace=True)
register("project_root", lambda: str(ROOT), replace=True)
register("stem", stem, replace=True)
register("sweep_name", sweep_name, replace=True)
register("task_of", task_of, replace=True)
