"""The machine of this process, and the other processes of its run: cores, memory, sweeps,
``torchrun`` and ``srun``.
"""

import ctypes
import math
import os
import platform
from contextlib import suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from gcfed.utils.refusal import Refusal

_MALLOC = {  # the parameters of malloc.h
    -3: 1 << 30,  # M_MMAP_THRESHOLD
    -1: (1 << 31) - 1,  # M_TRIM_THRESHOLD
    -2: 64 << 20,  # M_TOP_PAD
}


def keep_freed_memory() -> None:
    """Keeps glibc from returning freed activations to the kernel after each local step.

    Training is then 6 to 14 % faster.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in _MALLOC.items():
        mallopt(parameter, value)


def cores() -> int:
    """Cores that this run may use: ``OMP_NUM_THREADS`` if set, else those of the system or
    container (cgroup v2).
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    present = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        present = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(present, math.ceil(int(quota) / int(period))))
    return present


def available_memory() -> int:
    """Bytes that a new program may take in this machine, or in this container (cgroup v2)."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError):  # no such file
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):  # with the caches of files
                available = 1024 * int(line.split()[1])
    with suppress(OSError, ValueError):  # no such file, or "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        available = min(available, max(0, limit - used))
    return available


def in_sweep() -> bool:
    """Whether this is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def launched() -> tuple[str, int, int] | None:
    """Name, nodes and processes per node of a run whose processes ``torchrun`` or ``srun`` started.

    None for other runs, and for a single process.
    """
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        name = variables["TORCHELASTIC_RUN_ID"]
        processes = int(variables.get("WORLD_SIZE", 1))
        machines = int(variables.get("GROUP_WORLD_SIZE", 1))
    elif "SLURM_STEP_ID" in variables:
        name = f"{variables['SLURM_JOB_ID']}-{variables['SLURM_STEP_ID']}"
        processes = int(variables.get("SLURM_NTASKS", 1))
        machines = int(variables.get("SLURM_STEP_NUM_NODES", 1))
    else:
        return None
    if processes <= 1:
        return None
    return name, machines, processes // machines


def launch_folder() -> str | None:
    """The name of the folder that all processes of a run share; None for a run of one command."""
    launch = launched()
    if launch is None:
        return None
    name, _, _ = launch
    if name == "none":
        raise Refusal(
            "torchrun gave this run no name: add --standalone (one machine) or --rdzv-id=<name>."
        )
    return f"job_{name}"


def leads() -> bool:
    """Whether this process is the first or only one of its run, and so writes to
    the run's folder.
    """
    for variable in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):  # in the order of Lightning
        rank = os.environ.get(variable)
        if rank:
            return rank == "0"
    return True
