"""OmegaConf resolvers of the configs: the project's folder, and the folder that a run writes to."""

import os
import sys
from datetime import datetime
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from gcfed.utils.cpu import cores

ROOT = Path(__file__).resolve().parents[3]
OVERRIDES = "overrides.yaml"  # written by the run itself, once it has accepted its settings
# They change nothing of what a run computes, so a run is recognised without them.
_FREE = (
    "ckpt_path=",
    "rounds=",
    "trainer",
    "extras",
    "targets",
    "logger",
    "callbacks",
    "metrics",
    "client_store=",
    "client_store.folder=",
    "paths.",
    "eval_every=",
    "hydra.",
)


def run_dir(base: str, ckpt_path: str | None, overrides: list[str] | None = None) -> str:
    """Where a run writes: a new folder under ``base``, or that of the run which ``ckpt_path`` continues.

    ``ckpt_path=last`` is the newest run under ``base`` with a checkpoint and the same overrides.
    """
    new = Path(base) / (job() or datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3])
    if ckpt_path is None:
        return str(new)
    if ckpt_path != "last":
        path = Path(ckpt_path)
        return str(path.parent.parent if path.parent.name == "checkpoints" else new)
    checkpoints = sorted(
        Path(base).glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for run in (checkpoint.parent.parent for checkpoint in checkpoints):
        saved = run / OVERRIDES
        if not saved.is_file():
            continue
        if _identity(yaml.safe_load(saved.read_text())) == _identity(overrides):
            return str(run)
    return str(new)


def one_of_several() -> bool:
    """Whether ``torchrun`` or ``srun`` started this process as one of several of a run.

    Not so in the script of a SLURM job before its ``srun``.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
    return torchrun or ("SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1)


def job() -> str | None:
    """A folder for all processes of one run, which have no clock in common; None for a run of one command."""
    if not one_of_several():
        return None
    name = os.environ.get("TORCHELASTIC_RUN_ID") or f"{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    if name == "none":
        raise ValueError(
            "torchrun gave this run no name that its processes share: add --standalone (one machine) or "
            "--rdzv-id=<name> to torchrun, or name the folder with hydra.run.dir=logs/<name>."
        )
    return f"job_{name}"


def sweep_dir(base: str, ckpt_path: str | None) -> str:
    """A new folder for a sweep; with ``ckpt_path=last`` that of the newest one with the same overrides, to continue."""
    if ckpt_path == "last":
        # Not an argument, as in run_dir: each job would have its own overrides there, and a folder of its own.
        mine = _identity([word for word in sys.argv[1:] if "=" in word and not word.startswith("--")])
        for sweep in sorted(Path(base).glob("multirun_*/"), reverse=True):
            saved = sweep / "multirun.yaml"  # Hydra's own
            if saved.is_file() and _identity(yaml.safe_load(saved.read_text())["hydra"]["overrides"]["task"]) == mine:
                return str(sweep)
    return str(Path(base) / datetime.now().strftime("multirun_%Y-%m-%d_%H-%M-%S"))


def changes_results(override: str) -> bool:
    """Whether this override changes what a run computes, and not only how long, where or how closely watched."""
    return not override.lstrip("+~").startswith(_FREE)


def _identity(overrides: list[str] | None) -> list[str]:
    return sorted(o for o in overrides or [] if changes_results(o))


def all_devices(accelerator: str) -> int:
    """Processes of ``trainer=ddp``: one a GPU, or one a core where the CPU trains."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return cores()


def last_layer(hidden: list[int] | int | None) -> str | None:
    """The name of the last linear layer behind hidden ones of these widths; None for a model without such widths."""
    if hidden is None:
        return None
    return "fc2" if isinstance(hidden, int) else f"fc{len(hidden) + 1}"


def length(values: list, times: int = 1) -> int:
    """The number of values, times a factor: the clients that follow from a list of data sets."""
    return len(values) * times


def register() -> None:
    """Registers the resolvers; those that read the clock answer once for each config."""
    OmegaConf.register_new_resolver("all_devices", all_devices, replace=True)
    OmegaConf.register_new_resolver("last_layer", last_layer, replace=True)
    OmegaConf.register_new_resolver("length", length, replace=True)
    OmegaConf.register_new_resolver("project_root", lambda: str(ROOT), replace=True)
    OmegaConf.register_new_resolver("run_dir", run_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("sweep_dir", sweep_dir, replace=True, use_cache=True)


register()
