"""OmegaConf resolvers of the configs, and where these and the project lie."""

import sys
from pathlib import Path

from omegaconf import OmegaConf

from gcfed.utils.cpu import cores
from gcfed.utils.processes import nodes, processes_of_node

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
    if (there := processes_of_node()) is not None:
        return there
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return cores()


def last_layer(hidden: list[int] | int | None) -> str | None:
    """The name of the last linear layer behind hidden ones of these widths; None for a model without such widths."""
    if hidden is None or isinstance(hidden, float | str):  # the model refuses them, and says why
        return None
    return "fc2" if isinstance(hidden, int) else f"fc{len(hidden) + 1}"


def length(values: list, times: int = 1) -> int:
    """The number of values, times a factor: the clients that follow from a list of data sets."""
    return len(values) * times


def class_name(target: str | None) -> str:
    """The last part of a dotted name: ``Net`` of ``mynet.Net``."""
    return str(target).rpartition(".")[2]


def stem(path: object, default: str) -> str:
    """What a run on a file, a folder or a module is called: ``flowers`` for ``../flowers/`` or ``flowers.npz``."""
    return (Path(str(path)).resolve().stem if path else "") or default


def task_of(regression: object) -> str:
    """The task of a table whose target is a number, or a class."""
    return f"gcfed.tasks.{'SquaredError' if regression is True else 'Classification'}"


for _resolver in (all_devices, class_name, command, last_layer, length, nodes, stem, task_of):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
OmegaConf.register_new_resolver("project_root", lambda: str(ROOT), replace=True)
