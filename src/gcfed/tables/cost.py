"""Estimates how long runs will take: rounds × local steps × seconds of a plain training step on one
core.
"""

import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from time import process_time

import torch
from omegaconf import DictConfig, open_dict

from gcfed.assemble import assemble, start_at_random
from gcfed.jobs import in_words
from gcfed.utils.refusal import message_of


def estimate(left: Sequence[tuple[DictConfig, int]]) -> str:
    """An estimate for runs, from their configs and the rounds that are left.

    It downloads nothing and names errors.
    """
    steps: dict[str, float] = {}  # data set, model and batch size → seconds of a step
    rounds_of: dict[int, float] = {}  # a config's id → seconds of a round
    unknown: dict[str, None] = {}  # why configs have no estimate
    seconds = 0.0
    with _on_one_core():
        for cfg, rounds in left:
            if id(cfg) not in rounds_of:
                try:
                    rounds_of[id(cfg)] = seconds_a_round(cfg, steps)
                except Exception as error:
                    text = message_of(error)[:150]
                    unknown[f"\n  not counted: {cfg.tags.data}, {cfg.tags.model}: {text}"] = None
                    rounds_of[id(cfg)] = 0.0
            seconds += rounds * rounds_of[id(cfg)]
    time = f"about {in_words(seconds)}" if seconds >= 1 else "less than a second"
    rest = "without each job's start and what methods add to a step"
    return f"{time} on one core, {rest}{''.join(unknown)}"


@contextmanager
def _on_one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds_a_round(asked: DictConfig, steps: dict[str, float]) -> float:
    """Seconds of a round and its share of the tests. ``steps`` keeps what is measured."""
    cfg = deepcopy(asked)
    with open_dict(cfg):
        start_at_random(cfg)
        cfg.paths.output_dir = "."
        cfg.callbacks = {}
        cfg.metrics = {}
        if "download" in cfg.data.dataset:
            cfg.data.dataset.download = False
    assembly = assemble(cfg)
    data = assembly.data
    batch = cfg.client.batch_size
    sizes = data.sizes()
    number = assembly.loop.sampler.per_round * assembly.loop.solver.num_steps(sizes).mean()
    # a test has no backward pass: a third of a step
    number += data.num_test / batch / 3 / cfg.eval_every
    kind = repr((cfg.tags.data, cfg.model, batch))
    if kind not in steps:
        module = assembly.module
        dtype = next(module.parameters()).dtype
        data.to_device(torch.device("cpu"), dtype, torch.contiguous_format)
        x, y = data.fetch(torch.arange(min(batch, len(data.labels))), None)

        def step() -> None:
            module.task.losses(module.net(x), y).mean().backward()

        steps[kind] = min(timeit.repeat(step, timer=process_time, number=3, repeat=3)) / 3
    return number * steps[kind]
