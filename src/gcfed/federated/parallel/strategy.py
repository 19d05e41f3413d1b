"""Spreads a run over processes. They share a round's cohort and communicate once a round."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gcfed.federated.parallel.launch import ForkLauncher, end_with_parent
from gcfed.utils.machine import cores, launched, present_memory


class CohortStrategy(DDPStrategy):
    """Every process holds the global model and trains its share of the cohort; updates are summed once a round.

    The module is not wrapped in ``DistributedDataParallel``, because clients must drift apart during local training.
    The strategy forks the processes if it can (:class:`ForkLauncher`). Otherwise Lightning starts the command once for
    each process. Under ``torchrun`` and SLURM the processes exist already.

    Args:
        timeout: how long a process waits for the others. torch's default of half an hour may be too short for the
            training of one client. A process that ends is noticed at once.
    """

    def __init__(self, *, timeout: timedelta = timedelta(days=1), **kwargs: Any) -> None:
        super().__init__(timeout=timeout, **kwargs)

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if can_fork() and self.num_nodes == 1 and not environment.creates_processes_externally:
            self._launcher = ForkLauncher(self.num_processes)
        else:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        if not dist.is_initialized():
            if isinstance(self._launcher, ForkLauncher):
                self._launcher.join_group(self._timeout)
            elif "TORCHELASTIC_RUN_ID" in os.environ:
                end_with_parent()  # otherwise the processes of a killed agent would continue
        super().setup_distributed()
        if self.root_device.type == "cuda":
            try:
                self.barrier()  # NCCL connects the GPUs at the first call
            except dist.DistBackendError as error:
                text = "trainer=ddp: NCCL cannot connect the GPUs. MIG slices of one GPU need one run each."
                raise RuntimeError(text) from error

    def configure_ddp(self) -> None:
        return


def can_fork() -> bool:
    """Whether a run may fork: under Linux, and without a GPU, because a fork would lose its autograd threads."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


def trains_on_cpu(accelerator: str) -> bool:
    """Whether this ``trainer.accelerator`` means the CPU here. ``auto`` does so on a Mac, since sums need float64."""
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def spread(trainer: DictConfig, per_round: int, net: nn.Module, num_test: int) -> dict[str, Any]:
    """The devices and the strategy of the trainer.

    ``trainer.devices=auto`` means one GPU, or on CPUs one process per core, as far as memory suffices. Two processes of
    one thread train the CNN's clients about a quarter faster than one process of two threads, and an MLP's by three
    quarters (docs/performance.md). No run on CPUs has more processes than clients in a round or test samples.

    Raises:
        ValueError: several processes of a job would each train the whole run.
    """
    devices, on_cpu, strategy = trainer.devices, trains_on_cpu(trainer.accelerator), trainer.get("strategy")
    if launched():
        if strategy is None:
            raise ValueError("this process is one of several, and each would train the whole run: set trainer=ddp.")
        return {}
    if devices == "auto":
        in_job = "LOCAL_RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", 1)) > 1  # a script before its srun
        # A process needs the memory of up to 19 models (VGG11): the global model, the broadcast one, a client's with
        # its gradients and momentum, the sums of updates (four models), activations, and what the allocator keeps.
        fitting = int(0.5 * present_memory() / (19 * sum(p.nbytes for p in net.parameters())))
        devices = min(cores(), fitting) if on_cpu and can_fork() and not in_job else 1
    if not on_cpu and devices != 1:
        one = OmegaConf.is_list(devices) and len(devices) == 1
        return {} if one or strategy is not None else {"strategy": CohortStrategy()}
    devices = max(1, min(int(devices), per_round, num_test))
    # Lightning would take a SLURM job of one task for processes that SLURM starts.
    several = {"strategy": CohortStrategy(cluster_environment=LightningEnvironment())} if devices > 1 else {}
    return {"devices": devices} | several


def rank_and_world() -> tuple[int, int]:
    """This process's rank, and the number of processes."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
