"""A few local steps of a model on random numbers: how fast this machine is, before any data are read."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from omegaconf import DictConfig

from gcfed.data.batch import Batch
from gcfed.federated.module import FederatedModule
from gcfed.federated.solver import LocalSolver
from gcfed.federated.spread import spread, trains_on_cpu
from gcfed.federated.stack import ClientStack, broadcast_state
from gcfed.run import build_module
from gcfed.utils.cpu import keep_freed_memory
from gcfed.utils.instantiate import build

TESTED = 100  # samples of a timed test
SECONDS = 0.5  # of timed steps and, as much again, of timed tests; at least one of each


@dataclass(frozen=True)
class Speed:
    """What this machine does.

    Attributes:
        step_s: seconds of a local step of FedAvg with a whole batch, of ``at_once`` clients side by side.
        test_s: seconds of testing a sample.
        processes: that a run is spread over.
        model_bytes: of the parameters.
    """

    step_s: float
    test_s: float
    at_once: int
    processes: int
    model_bytes: int


def measure(cfg: DictConfig) -> Speed:
    """The speed of a composed config's model, batch size and precision, on the device that its run would take."""
    keep_freed_memory()
    device = torch.device("cpu")
    if not trains_on_cpu(cfg.trainer.accelerator):
        device = torch.accelerator.current_accelerator(check_available=True) or device
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        module = build_module(cfg).to(device)
        solver: LocalSolver = build(cfg.client)
        loop = SimpleNamespace(sampler=SimpleNamespace(per_round=cfg.participation.per_round))
        layout = spread(cfg.trainer, loop, module, num_test=10**9)  # type: ignore[arg-type]
        asked = cfg.trainer.devices
        processes = int(layout.get("devices") or (asked if isinstance(asked, int) else 1))
        at_once = solver.stack_size(module.net, device, cfg.participation.per_round)
        try:
            if processes > 1:
                torch.set_num_threads(1)
            step_s, test_s = _times(cfg, module, solver, at_once, device)
        finally:
            torch.set_num_threads(threads)
    return Speed(step_s, test_s, at_once, processes, sum(p.nbytes for p in module.net.parameters()))


def _times(
    cfg: DictConfig, module: FederatedModule, solver: LocalSolver, k: int, device: torch.device
) -> tuple[float, float]:
    batch = _batch(cfg, module, k, device)
    net = module.net
    clients = np.arange(k)
    stack = ClientStack(net, broadcast_state(net), clients, clients + 1, clients * 0 + 1, task=module.task)
    optimizer = solver.optimizer(list(stack.leaves.values()))
    half = cfg.precision == "bf16-mixed"

    def autocast() -> AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()

    def step() -> None:
        solver.step(stack, batch, optimizer.step, (), lambda: None, autocast)

    tested = batch.x[0, torch.arange(TESTED, device=device) % cfg.client.batch_size]
    if tested.dim() == 4:
        tested = tested.to(memory_format=module.memory_format)

    def test() -> None:
        with torch.no_grad(), autocast():
            net(tested)

    net.train()
    step_s = _seconds(step, device)
    net.eval()
    return step_s, _seconds(test, device) / TESTED


def _batch(cfg: DictConfig, module: FederatedModule, k: int, device: torch.device) -> Batch:
    """Random inputs ``[k, B, *input]`` and random labels of the kind that the network's outputs ask for.

    Labels that could be learned would not do: gradients that vanish are slow to compute with.
    """
    shape, dtype = (k, cfg.client.batch_size, *cfg.data.input_shape), next(module.net.parameters()).dtype
    if cfg.data.transform._target_.endswith("TextTransform"):
        x = torch.randint(cfg.data.num_classes, shape, device=device)
    else:
        x = torch.randn(shape, dtype=dtype, device=device)
    if len(shape) == 5:
        x = x.flatten(0, 1).to(memory_format=module.memory_format).unflatten(0, shape[:2])
    with torch.no_grad():
        out = module.net(x[0, :2])
    outputs = (k, cfg.client.batch_size, *out.shape[1:])
    if module.task.has_classes:
        y = torch.randint(outputs[-1], outputs[:-1], device=device)
    else:
        y = torch.randn(outputs, dtype=dtype, device=device)
    return Batch(x, y, None, torch.full((k,), float(y[0].numel()), device=device))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, over as many as ``SECONDS`` hold; the first, which allocates, counts if it fills them.

    On one thread those of the processor: other programs that happen to run now take nothing from the estimate.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter

    def timed() -> float:
        started = clock()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return clock() - started

    if (first := timed()) > SECONDS:
        return first
    taken = [timed()]
    while sum(taken) < SECONDS and len(taken) < 50:
        taken.append(timed())
    return float(np.median(taken))
