"""Estimates how long runs will take: rounds × local steps × seconds of a plain training step on one
core.
"""

import timeit
from collections.abc import Sequence
from time import process_time

import numpy as np
import torch
from omegaconf import DictConfig, open_dict

from gcfed.assemble import assemble


def estimate(left: Sequence[tuple[DictConfig, int]]) -> str:
    """An estimate for runs, from their configs and the rounds that are left.

    It downloads nothing and names errors.
    """
    steps: dict[str, float] = {}  # data set, model and batch size → seconds of a step
    # a config's id → seconds of a round, or why they are unknown
    costs: dict[int, float | str] = {}
    torch.set_num_threads(1)
    for cfg in {id(cfg): cfg for cfg, _ in left}.values():
        try:
            costs[id(cfg)] = seconds_a_round(cfg, steps)
        except Exception as error:
            costs[id(cfg)] = (
                f"{cfg.tags.data}, {cfg.tags.model}: {' '.join(str(error).split())[:150]}"
            )
    hours = sum(
        rounds * cost / 3600 for cfg, rounds in left if not isinstance(cost := costs[id(cfg)], str)
    )
    unknown = [
        f"\n  not counted: {why}" for why in dict.fromkeys(costs.values()) if isinstance(why, str)
    ]
    return f"about {hours:,.1f} h on one core, without what methods add to a step{''.join(unknown)}"


def seconds_a_round(cfg: DictConfig, steps: dict[str, float]) -> float:
    with open_dict(cfg):
        cfg.paths.output_dir, cfg.callbacks, cfg.metrics = ".", {}, {}
        if "download" in cfg.data.dataset:
            cfg.data.dataset.download = False
    parts = assemble(cfg)
    data, module, loop, batch = parts.data, parts.module, parts.loop, cfg.client.batch_size
    number = (
        loop.sampler.per_round
        * loop.solver.num_steps(data.sizes(np.arange(data.num_clients))).mean()
    )
    # a test has no backward pass: a third of a step
    number += data.num_test / batch / 3 / cfg.eval_every
    if (kind := repr((cfg.tags.data, cfg.model, batch))) not in steps:
        data.to_device(
            torch.device("cpu"), next(module.parameters()).dtype, torch.contiguous_format
        )
        x, y = data.fetch(torch.arange(min(batch, len(data.labels))), None)
        step = lambda: module.task.losses(module.net(x), y).mean().backward()  # noqa: E731
        steps[kind] = min(timeit.repeat(step, timer=process_time, number=3, repeat=3)) / 3
    return number * steps[kind]
