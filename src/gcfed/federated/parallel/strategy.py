"""How a run is laid out over processes, which share a round's cohort and talk once a round."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gcfed.federated.parallel.launch import ForkLauncher, end_with_parent
from gcfed.utils.machine import cores, one_of_several, present_memory


class CohortStrategy(DDPStrategy):
    """Every process holds the global model and trains its share of the cohort; updates are summed once a round.

    The module is not wrapped in ``DistributedDataParallel``: clients must drift apart, so nothing may be synchronised
    inside local training. Where it can, the strategy forks the processes (:class:`ForkLauncher`); elsewhere Lightning
    starts the command once a process, and under ``torchrun`` or SLURM they are there already.

    Args:
        timeout: how long a process waits for the others; one that died is noticed at once. torch's half hour could be
            less than the training of one client.
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
                end_with_parent()  # or what a killed agent leaves would go on alone
        super().setup_distributed()

    def configure_ddp(self) -> None:
        return


def can_fork() -> bool:
    """Whether a run may fork: under Linux and beside no GPU, whose autograd threads would be missing in the fork."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


def trains_on_cpu(accelerator: str) -> bool:
    """Whether this ``trainer.accelerator`` means the CPU here. On a Mac it does: sums need float64."""
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def spread(trainer: DictConfig, per_round: int, net: nn.Module, num_test: int) -> dict[str, Any]:
    """Devices and strategy of ``trainer.devices=auto``: one GPU, or one process a core as far as clients and memory go.

    A client trained on one core has no threads that wait for each other: two cores train the CNN's clients about a
    quarter faster as two processes than as one with two threads, and an MLP's by three quarters (docs/performance.md).

    Raises:
        ValueError: several processes of a job that would each train alone; more processes than there is work for.
    """
    several, devices = one_of_several(), str(trainer.devices)
    useful = max(2, min(os.cpu_count() or 2, per_round, num_test))  # two: to compare with one, anywhere
    if devices.isdecimal() and int(devices) > useful and trains_on_cpu(trainer.accelerator) and not several:
        if OmegaConf.is_interpolation(trainer, "devices"):  # trainer=ddp takes all cores
            return {"devices": useful}
        raise ValueError(
            f"trainer.devices={devices} asks for more processes than there are cores ({os.cpu_count()}), clients in a "
            f"round ({per_round}) or test samples ({num_test}): take at most {useful}."
        )
    if trainer.get("strategy") is not None:
        return {}
    if several:
        raise ValueError(
            "this process is one of several of a job, and would train all of the run alone: set trainer=ddp."
        )
    if trainer.devices != "auto":
        one = trainer.devices in (1, "1") or (OmegaConf.is_list(trainer.devices) and len(trainer.devices) == 1)
        return {} if one else {"strategy": CohortStrategy()}
    if not (can_fork() and trains_on_cpu(trainer.accelerator)) or "LOCAL_RANK" in os.environ:
        return {"devices": 1}
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1:  # a job's script, before its srun
        return {"devices": 1}
    model = sum(p.nbytes for p in net.parameters())
    # A process holds the global model, the broadcast one, a client's with its gradients and momentum, and the sums of
    # updates, which are four models, beside activations and what the allocator keeps: with VGG11, 19 models in all.
    fitting = int(0.5 * present_memory() / (19 * model))
    processes = max(1, min(cores(), per_round, fitting, num_test))
    if processes == 1:
        return {"devices": 1}
    # Lightning would take a SLURM job of one task for processes that SLURM starts.
    return {"devices": processes, "strategy": CohortStrategy(cluster_environment=LightningEnvironment())}


def rank_and_world() -> tuple[int, int]:
    """This process's rank among those of the run, and their number."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


@contextmanager
def partners() -> Iterator[None]:
    """Raises ConnectionError, with the remedy, where torch reports that it has lost another process of the run."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise ConnectionError(
            "another process of this run has ended, or cannot be reached any more; its own last lines may say why. "
            "The same command with ckpt_path=last goes on after the last finished round."
        ) from error
