"""Several CPU processes for one run, forked when everything is in memory."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from gcfed.utils.machine import cores

_STOP = signal.SIGUSR2  # nobody else sends it: a process that dies of another signal was killed


class ForkLauncher(_Launcher):
    """Forks a prepared run into processes that share its data and its imports. The calling process is rank 0.

    Lightning's launchers start the whole command again for every process, with its imports and a copy of the data, and
    cannot do so within a sweep. A fork takes milliseconds. The calling process keeps the trained module and the rows.

    The processes find each other through a file and communicate over the loopback interface. No other machine can
    connect.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.children: list[BaseProcess] = []  # the processes of ranks 1, 2, …

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Calls ``function`` in all processes; returns its result in this one.

        Raises:
            ChildProcessError: another process failed or was killed.
        """
        environment, threads = dict(os.environ), torch.get_num_threads()
        own, world = max(1, cores() // self.num_processes), str(self.num_processes)
        os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": world, "GLOO_SOCKET_IFNAME": "lo"}
        folder = TemporaryDirectory(prefix="gcfed_")
        self.store = Path(folder.name) / "store"
        try:
            for rank in range(1, self.num_processes):
                work = (rank, own, lambda: function(*args, **kwargs))
                child = multiprocessing.get_context("fork").Process(target=_child, args=work)
                child.start()
                self.children.append(child)
            torch.set_num_threads(own)
            result = function(*args, **kwargs)
            if failed := self._wait():
                raise ChildProcessError(failed)
            return result
        except RuntimeError as error:  # as torch reports that another process is gone
            if failed := self._end():
                raise ChildProcessError(f"{failed}; this process reports: {error}") from error
            raise
        finally:
            self._end()
            _leave_group()
            folder.cleanup()
            torch.set_num_threads(threads)
            rank_zero_only.rank = 0  # type: ignore[attr-defined]
            os.environ.clear()
            os.environ.update(environment)

    def join_group(self, timeout: timedelta | None) -> None:
        """Joins the group of processes. Lightning would open a port on all interfaces for this."""
        rank, store = int(os.environ["LOCAL_RANK"]), dist.FileStore(str(self.store), self.num_processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.num_processes, timeout=timeout)

    def kill(self, signum: int) -> None:
        """Ends the run. Lightning calls it in rank 0 on SIGTERM."""
        self._end()
        raise SIGTERMException(128 + signum)

    def _end(self) -> str:
        """Ends the processes that still run; describes a failure before that."""
        for child in self.children:
            if child.is_alive():
                os.kill(child.pid, _STOP)  # type: ignore[arg-type]
        return self._wait()

    def _wait(self) -> str:
        """Waits for the other processes; describes the first failure, a signal before an error; "" if there is none."""
        for child in self.children:
            child.join()
        codes = [(child.exitcode or 0, rank) for rank, child in enumerate(self.children, start=1)]
        self.children = []
        killed = [f"process {rank} of this run died of signal {-code}" for code, rank in codes if 0 > code != -_STOP]
        return [*killed, *(f"process {rank} of this run failed" for code, rank in codes if code > 0), ""][0]


def _child(rank: int, threads: int, function: Callable[[], Any]) -> None:
    """Does the work of a forked process.

    In a new thread, because GNU OpenMP would wait forever for the threads that the parent's main thread had.
    """
    end_with_parent()  # a kill of rank 0 ends the run
    signal.signal(_STOP, signal.SIG_DFL)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 handles them, and ends the others
        signal.signal(signum, signal.SIG_IGN)
    os.environ["LOCAL_RANK"] = str(rank)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as thread:
        thread.submit(function).result()
        thread.submit(_leave_group).result()  # not after a failure: the others notice that this process has ended


def end_with_parent() -> None:
    """Has Linux kill this process as soon as its parent has ended."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
