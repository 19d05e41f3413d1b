"""How a run is laid out over processes where the user leaves it open."""

import os
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from omegaconf import DictConfig, OmegaConf

from gcfed.federated.loop import FederatedLoop
from gcfed.federated.module import FederatedModule
from gcfed.federated.processes.strategy import CohortStrategy, can_fork
from gcfed.utils.machine import cores, one_of_several, present_memory


def trains_on_cpu(accelerator: str) -> bool:
    """Whether this ``trainer.accelerator`` means the CPU here, as on a Mac: its GPU has no float64, for sums."""
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def spread(trainer: DictConfig, loop: FederatedLoop, module: FederatedModule, num_test: int) -> dict[str, Any]:
    """Devices and strategy of ``trainer.devices=auto``: one GPU, or one process a core as far as clients and memory go.

    A client trained on one core has no threads that wait for each other: two cores train the CNN's clients about a
    quarter faster as two processes than as one with two threads, and an MLP's by three quarters (docs/performance.md).

    Raises:
        ValueError: several processes of a job that would each train alone; more processes than there is work for.
    """
    several, devices = one_of_several(), str(trainer.devices)
    useful = max(2, min(os.cpu_count() or 2, loop.sampler.per_round, num_test))  # two: to compare with one, anywhere
    if devices.isdecimal() and int(devices) > useful and trains_on_cpu(trainer.accelerator) and not several:
        if OmegaConf.is_interpolation(trainer, "devices"):  # trainer=ddp takes all cores
            return {"devices": useful}
        raise ValueError(
            f"trainer.devices={devices} asks for more processes than there are cores ({os.cpu_count()}), clients in a "
            f"round ({loop.sampler.per_round}) or test samples ({num_test}): take at most {useful}."
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
    model = sum(p.nbytes for p in module.net.parameters())
    # A process holds the global model, the broadcast one, a client's with its gradients and momentum, and the sums of
    # updates, which are four models, beside activations and what the allocator keeps: with VGG11, 19 models in all.
    fitting = int(0.5 * present_memory() / (19 * model))
    processes = max(1, min(cores(), loop.sampler.per_round, fitting, num_test))
    if processes == 1:
        return {"devices": 1}
    # Lightning would take a SLURM job of one task for processes that SLURM starts.
    return {"devices": processes, "strategy": CohortStrategy(cluster_environment=LightningEnvironment())}
