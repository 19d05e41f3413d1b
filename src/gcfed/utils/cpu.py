"""Makes a CPU run use the machine's cores and allocator well without the user choosing."""

import ctypes
import math
import os
import platform
from pathlib import Path

# mallopt's parameters, from glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Keeps glibc from handing freed activations back to the kernel after every local step.

    The next step asks for the same sizes again and would pay for them in page faults. Returns whether the C library
    took the settings; other libraries than glibc are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def spin_briefly() -> None:
    """Lets OpenMP's threads wait for each other asleep after a few microseconds; before torch is imported.

    A spinning thread holds the core that the thread it waits for needs as soon as another program has one of the two:
    beside a busy loop on one of two cores a round of the digits took 0.58 s, and takes 0.28 s. On a free machine
    nothing was lost.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def cores() -> int:
    """Cores that this run may take: ``OMP_NUM_THREADS`` where it is set, else those that the system lets it use.

    A container's share of processor time (cgroup v2) counts, which torch's own default overlooks.
    """
    if (wanted := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(wanted) > 0:
        return int(wanted)
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return present if quota == "max" else max(1, min(present, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return present


def present_memory() -> int:
    """Bytes of memory in this machine, or in this container (cgroup v2)."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(present, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return present
