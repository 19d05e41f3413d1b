"""What the jobs of a study will take, about: rounds × local steps × seconds of a step, and the bytes that stay."""

import logging
import time
import timeit
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, open_dict

from gcfed.assemble import Parts, assemble
from gcfed.check import check
from gcfed.federated.client import ClientProgram
from gcfed.federated.messages import Download, nbytes
from gcfed.utils.words import size


def estimate(left: Sequence[tuple[DictConfig, int]]) -> list[str]:
    """Of jobs by their configs and the rounds that they have to go; nothing is downloaded, and no error stops it."""
    steps: dict[str, float] = {}  # seconds of one, of each data set and model
    costs = dict[int, tuple[float, int]]()  # trials of a search have one config
    hours, disk, unknown = 0.0, 0, []
    for cfg, rounds in left:
        try:
            seconds, stored = costs[id(cfg)] = costs.get(id(cfg)) or cost(cfg, steps)
            hours, disk = hours + rounds * seconds / 3600, disk + stored
        except Exception as error:
            unknown.append(f"not counted: {cfg.tags.data}, {cfg.tags.model}: {' '.join(str(error).split())[:150]}")
    if unknown and not steps:
        return ["hours and disk: unknown", *dict.fromkeys(unknown)]
    of = f", of {len(left) - len(unknown)} of {len(left)} jobs; the rest is unknown" * bool(unknown)
    about = f"about {hours:,.1f} h on one core, without what methods add to a step, and {size(disk)} of disk{of}"
    return [about, *dict.fromkeys(unknown)]


def cost(cfg: DictConfig, steps: dict[str, float]) -> tuple[float, int]:
    """Seconds of a round on one core, and the bytes that a run leaves."""
    with open_dict(cfg):
        cfg.pop("hydra", None)  # a sweep's own is not filled in yet
        cfg.paths.output_dir, cfg.callbacks, cfg.metrics = ".", {}, {}
        if "download" in cfg.data.dataset:
            cfg.data.dataset.download = False
    check(cfg)
    parts = assemble(cfg)
    data, loop, batch = parts.data, parts.loop, cfg.client.batch_size
    sizes, per_round = data.sizes(np.arange(data.num_clients)), loop.sampler.per_round
    number = per_round * loop.solver.num_steps(sizes).mean()
    number += data.num_test / batch / 3 / cfg.eval_every  # a test has no backward pass: a third of a step
    if (kind := repr((cfg.tags.data, cfg.model, batch))) not in steps:
        steps[kind] = step(cfg, parts, np.array([sizes.argmax()]))
    model = nbytes(parts.module.broadcast_state())
    states = loop.stores.bytes_of(min(data.num_clients, cfg.rounds * per_round), model)
    return number * steps[kind], 2 * model + states  # the checkpoint and the final model


def step(cfg: DictConfig, parts: Parts, client: np.ndarray) -> float:
    """Seconds of a step of plain local training on one core."""
    module, data, loop = parts.module, parts.data, parts.loop
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # tips and device lists
    module.trainer = Trainer(accelerator="cpu", precision=cfg.precision, logger=False, enable_checkpointing=False)
    data.to_device(torch.device("cpu"), next(module.parameters()).dtype, module.memory_format)
    download = Download(0, cfg.seed, loop.solver.lr(0), module.broadcast_state(), client)
    loop.solver.steps = 5
    torch.set_num_threads(1)
    module.net.train()
    train = partial(ClientProgram(module, data, loop.solver, ()).train, download, client)
    return min(timeit.repeat(train, timer=time.process_time, number=1, repeat=3)) / loop.solver.steps
