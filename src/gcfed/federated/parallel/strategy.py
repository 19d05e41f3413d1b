"""Spreads a run over processes. They share a round's cohort and communicate once a round."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from gcfed.federated.parallel.shared import SharedSums
from gcfed.utils.machine import available_memory, cores, launched
from gcfed.utils.refusal import Refusal

_STOP = signal.SIGUSR2  # nobody else sends it: a process that dies of another signal was killed


class ForkLauncher(_Launcher):
    """Forks a prepared run into processes that share its data and its imports.

    The calling process is rank 0.

    Lightning's launcher of scripts starts the whole command again for every process, with its
    imports and a copy of the data, and cannot do so within a sweep. Its launcher of functions sends
    the trained module back as a file. A fork takes milliseconds. The calling process keeps the
    trained module and the rows. No other machine can connect: the processes meet through a file,
    add up in shared memory (:class:`~gcfed.federated.parallel.shared.SharedSums`), and send all
    else over the loopback interface.
    """

    is_interactive_compatible = True

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.children: list[BaseProcess] = []  # the processes of ranks 1, 2, …

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Calls ``function`` in all processes; returns its result in this one.

        Raises:
            ChildProcessError: another process failed or was killed.
        """
        environment = dict(os.environ)
        threads = torch.get_num_threads()
        os.environ |= {
            "NODE_RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_processes),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        folder = TemporaryDirectory(prefix="gcfed_")
        self.meeting = f"{folder.name}/store"
        shared = SharedSums(self.num_processes, self._are_alive)
        SharedSums.present = shared
        try:
            result = self._work(partial(function, *args, **kwargs))
            failure = self._join(stop=False)
            if failure:
                raise ChildProcessError(failure)
            return result
        except RuntimeError as error:  # torch may report that another process is gone
            failure = self._join()
            if not failure:
                raise
            several = ChildProcessError(f"{failure}; this process reports: {error}")
            # The same code may have failed in all processes: say which.
            for note in getattr(error, "__notes__", []):
                several.add_note(note)
            raise several from error
        finally:
            self._join()
            _leave_group()
            SharedSums.present = None
            shared.close()
            folder.cleanup()
            torch.set_num_threads(threads)
            os.environ.clear()
            os.environ.update(environment)

    def _are_alive(self) -> bool:
        """Whether all other processes live."""
        return all(child.is_alive() for child in self.children)

    def _work(self, work: Callable[[], Any]) -> Any:
        """Forks the other processes, and does this one's work."""
        threads = max(1, cores() // self.num_processes)
        for rank in range(1, self.num_processes):
            child = multiprocessing.get_context("fork").Process(
                target=_child, args=(rank, threads, work)
            )
            child.start()
            self.children.append(child)
        torch.set_num_threads(threads)
        return work()

    def kill(self, signum: int) -> None:
        """Ends the run. Lightning calls it in rank 0 on SIGTERM."""
        self._join()
        raise SIGTERMException(128 + signum)

    def _join(self, stop: bool = True) -> str:
        """Waits for the other processes, or ends them.

        Returns a sentence about a process that failed by itself; "" if none did.
        """
        for child in self.children:
            if stop and child.is_alive():
                os.kill(child.pid, _STOP)  # type: ignore[arg-type]
        failed = []
        for rank, child in enumerate(self.children, start=1):
            child.join()
            code = child.exitcode or 0
            if code not in (0, -_STOP):
                failed.append((code, rank))
        self.children = []
        if not failed:
            return ""
        # a signal, as a negative number, comes before the errors that follow from it
        code, rank = min(failed)
        what = f"died of signal {-code}" if code < 0 else "failed"
        return f"process {rank} of this run {what}"


def _child(rank: int, threads: int, function: Callable[[], Any]) -> None:
    """Does the work of a forked process.

    It works in a new thread, because GNU OpenMP would wait forever for the threads that the
    parent's main thread had.
    """
    end_with_parent()  # a kill of rank 0 ends the run
    signal.signal(_STOP, signal.SIG_DFL)
    # rank 0 handles them, and ends the others
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.environ["LOCAL_RANK"] = str(rank)
    assert SharedSums.present is not None
    SharedSums.present.rank = rank
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as thread:
        thread.submit(function).result()
        # After a failure, the others notice that this process has ended.
        thread.submit(_leave_group).result()


def end_with_parent() -> None:
    """Has Linux kill this process as soon as its parent has ended."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class CohortStrategy(DDPStrategy):
    """Every process holds the global model and trains its share of the cohort; updates are summed
    once a round.

    The module is not wrapped in ``DistributedDataParallel``, because clients must drift apart
    during local training. The strategy forks the processes if it can (:class:`ForkLauncher`).
    Otherwise Lightning starts the command once for each process. Under ``torchrun`` and SLURM the
    processes exist already.
    """

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if can_fork() and self.num_nodes == 1 and not environment.creates_processes_externally:
            self._launcher = ForkLauncher(self.num_processes)
        else:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        # a client may train for longer than torch's default of half an hour
        self._timeout = timedelta(days=1)
        # Lightning would open a port on all interfaces
        if isinstance(self._launcher, ForkLauncher):
            meeting = self._launcher.meeting  # type: ignore[attr-defined,unused-ignore]
            store = dist.FileStore(meeting, self.num_processes)  # type: ignore[attr-defined,unused-ignore]
            dist.init_process_group(
                "gloo",
                store=store,
                rank=int(os.environ["LOCAL_RANK"]),
                world_size=self.num_processes,
                timeout=self._timeout,
            )
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()  # otherwise the processes of a killed agent would continue
        super().setup_distributed()

    def configure_ddp(self) -> None:
        return

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes."""
        shared = SharedSums.present
        if shared is None:
            super().barrier(*args, **kwargs)
        elif dist.is_initialized():
            shared.wait_for_all()


def can_fork() -> bool:
    """Whether a run may fork: under Linux, and without a GPU, because a fork would lose its
    autograd threads.
    """
    return sys.platform == "linux" and not torch.accelerator.is_available()


def trains_on_cpu(accelerator: str) -> bool:
    """Whether this ``trainer.accelerator`` means the CPU here.

    ``auto`` does so on a Mac, since sums need float64.
    """
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def spread(
    trainer: DictConfig, per_round: int, net: nn.Module, num_test: int, models: int
) -> dict[str, Any]:
    """The devices and the strategy of the trainer.

    ``trainer.devices=auto`` means one GPU, or on CPUs one process per core, as far as memory
    suffices: two processes of one thread are faster than one of two. On CPUs -1 means the same.
    No run on CPUs has more processes than clients in a round or test samples.

    Args:
        models: about how many times the network's parameters a process holds in memory.

    Raises:
        Refusal: several processes of a job would each train the whole run, or the devices are
            GPUs and the run trains on CPUs.
    """
    devices = trainer.devices
    on_cpu = trains_on_cpu(trainer.accelerator)
    has_strategy = trainer.get("strategy") is not None
    if launched():
        if not has_strategy:
            raise Refusal(
                "this process is one of several, and each would train the whole run: set"
                " trainer=ddp."
            )
        return {}
    if devices == "auto" and not on_cpu:
        devices = 1
    if not on_cpu and devices != 1:
        is_one = OmegaConf.is_list(devices) and len(devices) == 1
        if is_one or has_strategy:
            return {}
        return {"strategy": CohortStrategy()}
    if devices in ("auto", -1, "-1"):
        devices = _processes_on_cpu(net, models)
    if not str(devices).isdecimal():
        raise Refusal(
            f"trainer.devices={devices} names GPUs, and this run trains on the CPU: set the number"
            " of processes, such as trainer.devices=2."
        )
    processes = max(1, min(int(devices), per_round, num_test))
    if processes == 1:
        return {"devices": 1}
    # Lightning would take a SLURM job of one task for processes that SLURM starts.
    strategy = CohortStrategy(cluster_environment=LightningEnvironment())
    return {"devices": processes, "strategy": strategy}


def _processes_on_cpu(net: nn.Module, models: int) -> int:
    """One process per core, as far as half of the free memory suffices; a single one where a run
    cannot fork.
    """
    # the script of a job, which will start its processes with srun
    in_job = "LOCAL_RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", 1)) > 1
    if in_job or not can_fork():
        return 1
    needed = models * sum(parameter.nbytes for parameter in net.parameters())
    return min(cores(), int(0.5 * available_memory() / needed))


def rank_and_world() -> tuple[int, int]:
    """This process's rank, and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
