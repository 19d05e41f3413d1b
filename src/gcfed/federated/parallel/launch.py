"""Several CPU processes for one run, forked once everything is in memory."""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gcfed.utils.files import in_words, scratch
from gcfed.utils.machine import cores

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_STOP = signal.SIGUSR2  # nobody else sends it: whoever dies of another signal was killed
_VARIABLES = ("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")


class ForkLauncher(_Launcher):
    """Forks a prepared run into processes that share its data and its imports, and is itself the first of them.

    Lightning starts every process as the whole command again, which costs each one the imports and a copy of the data,
    and cannot be done from within a sweep. A fork costs milliseconds. What the calling process has at the end (the
    trained module, metrics, the loop's rows) it keeps, being rank 0.

    The processes, the calling one included, find each other through a file and talk over the loopback interface: no
    other machine can reach them.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.children: list[Any] = []  # the processes of ranks 1, 2, …

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs ``function`` in all processes; returns what it returned in this one.

        Raises:
            ChildProcessError: another process failed or was killed.
        """
        before = {key: os.environ.get(key) for key in _VARIABLES}
        os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(self.num_processes)}
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        folder = scratch()
        self.store = Path(folder.name) / "store"
        threads, share = torch.get_num_threads(), max(1, cores() // self.num_processes)
        context = multiprocessing.get_context("fork")
        try:
            for rank in range(1, self.num_processes):
                work = (rank, share, os.getpid(), lambda: function(*args, **kwargs))
                child = context.Process(target=_child, args=work)
                child.start()
                self.children.append(child)  # after it: one that could not be forked cannot be waited for
            torch.set_num_threads(share)
            result = function(*args, **kwargs)
            if failed := self._wait():
                raise ChildProcessError(failed)
            return result
        except Exception as error:
            failed = self._end()
            speaks_for_all = isinstance(error, ValueError | OSError) and not isinstance(error, ConnectionError)
            if failed and not speaks_for_all:
                raise ChildProcessError(f"{failed}; what this process saw of it: {error}") from error
            raise
        finally:
            self._end()
            _leave_group()
            folder.cleanup()
            torch.set_num_threads(threads)
            rank_zero_only.rank = 0  # type: ignore[attr-defined]
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value

    def join_group(self, timeout: timedelta | None) -> None:
        """What each process calls, before Lightning would open a port on all interfaces for it."""
        rank, store = int(os.environ["LOCAL_RANK"]), dist.FileStore(str(self.store), self.num_processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.num_processes, timeout=timeout)

    def kill(self, signum: int) -> None:
        """What Lightning calls in rank 0 on SIGTERM: gives the round up at once, as any kill does."""
        self._end()
        raise SIGTERMException(128 + signum)

    def _end(self) -> str:
        """Ends the processes that still run; says how another one had failed by then."""
        for child in self.children:
            if child.is_alive():
                os.kill(child.pid, _STOP)
        return self._wait()

    def _wait(self) -> str:
        """Waits for the other processes; says how the first of them failed, a signal before an error."""
        for child in self.children:
            child.join()
        codes = [(child.exitcode, rank) for rank, child in enumerate(self.children, start=1)]
        self.children = []
        killed = [f"process {rank} of this run died of signal {-code}" for code, rank in codes if 0 > code != -_STOP]
        return [*killed, *(f"process {rank} of this run failed" for code, rank in codes if code > 0), ""][0]


def _child(rank: int, threads: int, parent: int, function: Callable[[], Any]) -> None:
    """Does a forked process's work.

    In a new thread: GNU OpenMP keeps books of its threads for each thread that asks for some, and a fork copies the
    books but not the threads. The main thread would wait for them forever; a new one begins with none.
    """
    end_with_parent()  # whoever kills rank 0 means the run
    if os.getppid() != parent:  # it died before the line above
        raise SystemExit(1)
    signal.signal(_STOP, signal.SIG_DFL)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for rank 0, which ends the others
        signal.signal(signum, signal.SIG_IGN)
    os.environ["LOCAL_RANK"] = str(rank)
    done = False

    def work() -> None:
        nonlocal done
        torch.set_num_threads(threads)
        try:
            function()
            _leave_group()  # not after a failure: the end of this process is then what the others notice first
            done = True
        except (ValueError, OSError) as error:  # rank 0 most likely says the same, and shows where
            log.error("process %d: %s", rank, in_words(error))
        except BaseException:
            traceback.print_exc()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise SystemExit(not done)


def end_with_parent() -> None:
    """Has Linux kill this process as soon as the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
