"""How a run was started: in a sweep, or by ``torchrun`` or ``srun``, which start every process of it."""

import os

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode


def in_sweep() -> bool:
    """Whether this is a job of a sweep; no run that Python starts is one."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def one_of_several() -> bool:
    """Whether ``torchrun`` or ``srun`` started this process as one of several of a run.

    Not so in the script of a SLURM job before its ``srun``.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
    return torchrun or ("SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1)


def nodes() -> int:
    """The nodes of this run: as ``torchrun`` or ``srun`` made its processes, else one."""
    count = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_NODES")
    return int(count) if count and one_of_several() else 1


def processes_of_node() -> int | None:
    """How many processes ``torchrun`` or ``srun`` made on each node; None where neither did."""
    if not one_of_several():
        return None
    count = os.environ.get("LOCAL_WORLD_SIZE")
    return int(count) if count else int(os.environ["SLURM_NTASKS"]) // nodes()


def job() -> str | None:
    """A folder for all processes of one run, which have no clock in common; None for a run of one command.

    Raises:
        ValueError: ``torchrun`` gave the run no name.
    """
    if not one_of_several():
        return None
    name = os.environ.get("TORCHELASTIC_RUN_ID") or f"{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    if name == "none":
        raise ValueError(
            "torchrun gave this run no name that its processes share: add --standalone (one machine) or "
            "--rdzv-id=<name> to torchrun, or name the folder with hydra.run.dir=logs/<name>."
        )
    return f"job_{name}"


def leads() -> bool:
    """Whether this process is the first of its run, or its only one: the one that writes to the run's folder."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.environ.get("RANK", "0") == "0"
    if "SLURM_STEP_ID" in os.environ:
        return os.environ.get("SLURM_PROCID", "0") == "0"
    return os.environ.get("LOCAL_RANK", "0") == "0"
