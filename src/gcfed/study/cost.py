"""What the jobs of a study will take, about: rounds × local steps × seconds of a step, and the bytes that stay."""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, open_dict

from gcfed.assemble import Parts, assemble
from gcfed.federated.round import Round
from gcfed.federated.stack import broadcast_state, nbytes
from gcfed.runs.identity import setting
from gcfed.utils.words import size

STEPS = 5  # that are timed, three times over


def estimate(left: Sequence[tuple[DictConfig, int]]) -> list[str]:
    """Of jobs by their configs and the rounds that they have to go; nothing is downloaded, and no error stops it."""
    steps: dict[str, float] = {}  # seconds of one, of each data set and model
    costs: dict[str, tuple[float, int] | str] = {}  # seconds of a round and bytes, of each setting; or why unknown
    for cfg, _ in left:
        if setting(cfg) not in costs:
            key = setting(cfg)
            try:
                costs[key] = cost(cfg, steps)
            except Exception as error:
                costs[key] = f"{cfg.tags.data}, {cfg.tags.model}: {' '.join(str(error).split())[:150]}"
    found = [(costs[setting(cfg)], rounds) for cfg, rounds in left]
    known = [(rounds * cost[0] / 3600, cost[1]) for cost, rounds in found if not isinstance(cost, str)]
    hours, disk = (sum(column) for column in zip(*known, strict=True)) if known else (0, 0)
    time_left = f"{hours:.2g}" if hours < 10 else f"{hours:,.0f}"
    about = f"about {time_left} h on one core, without what methods add to a step, and {size(disk)} of disk"
    unknown = Counter(cost for cost, _ in found if isinstance(cost, str))
    return [about] * bool(known) + [f"not counted: {n} jobs, {why}" for why, n in unknown.items()]


def cost(cfg: DictConfig, steps: dict[str, float]) -> tuple[float, int]:
    """Seconds of a round on one core, and the bytes that a run leaves."""
    with open_dict(cfg):
        cfg.pop("hydra", None)  # a sweep's own is not filled in yet
        cfg.paths.output_dir, cfg.callbacks, cfg.metrics = "", {}, {}
        if "download" in cfg.data.dataset:
            cfg.data.dataset.download = False
    parts = assemble(cfg)
    data, loop, batch = parts.data, parts.loop, cfg.client.batch_size
    sizes, per_round = data.sizes(np.arange(data.num_clients)), loop.sampler.per_round
    number = per_round * loop.solver.num_steps(sizes).mean()
    number += data.num_test / batch / 3 / cfg.eval_every  # a test has no backward pass: a third of a step
    model = nbytes(broadcast_state(parts.module.net))
    states = loop.stores.bytes_of(min(data.num_clients, cfg.rounds * per_round), model)
    if (kind := repr((cfg.tags.data, cfg.model, batch))) not in steps:
        steps[kind] = step(cfg, parts, np.array([sizes.argmax()]))
    return number * steps[kind], 2 * model + states  # the checkpoint and the final model


def step(cfg: DictConfig, parts: Parts, client: np.ndarray) -> float:
    """Seconds of a step of plain local training on one core."""
    module, data, loop = parts.module, parts.data, parts.loop
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # tips and device lists
    module.trainer = Trainer(accelerator="cpu", precision=cfg.precision, logger=False, enable_checkpointing=False)
    data.to_device(torch.device("cpu"), next(module.parameters()).dtype, module.memory_format)
    round = Round(0, cfg.seed, client, data.num_clients, broadcast_state(module.net), loop.solver.lr(0))
    loop.methods, loop.solver.steps = [], STEPS
    torch.set_num_threads(1)
    times = [time.process_time()]
    for _ in range(3):
        loop.train_clients(module.trainer, module, client, round)
        times.append(time.process_time())
    return float(np.diff(times).min()) / STEPS
