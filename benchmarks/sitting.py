"""One sitting: rounds of FedAvg, rounds of GC-Fed and the plain loop in turn, in the processes of
one real run.

``benchmarks/run.py`` starts this file once for each layout of processes and threads.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import open_dict

from benchmarks.plain import gemm_rate, plain_seconds, training_flops
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import WORKLOADS, compose_workload
from gcfed.federated.engine.client import ClientRound
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.protocol.messages import Download
from gcfed.federated.training.hooks import StepHooks
from gcfed.federated.training.memory import TrainingMemory
from gcfed.methods.centralization import GlobalGC, LocalGC
from gcfed.participation.schedule import ClientRecord, Sampler
from gcfed.run import train

WARM_UP = 2
METHODS = ("fedavg", "gcfed")


def with_gc(t: int) -> int:
    """1 for rounds of GC-Fed.

    Each of two pairs begins with another method: the first round of a cohort is slower.
    """
    return (t ^ t // 2) & 1


class InPairs:
    """A sampler whose rounds 2i and 2i + 1 have the same cohort."""

    depends_on_losses = False

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.per_round = sampler, sampler.per_round

    def validate(self, num_clients: int) -> None:
        self.sampler.validate(num_clients)

    def choose(
        self, round_index: int, num_clients: int, seed: int, known: Mapping[int, ClientRecord]
    ) -> np.ndarray:
        return self.sampler.choose(round_index // 2, num_clients, seed, known)


class Sitting(Callback):
    """Times rounds: two to warm up, then pairs of FedAvg and GC-Fed on one cohort, in turns of who
    is first, each followed by the plain loop, then a pair with the stopwatch.

    Args:
        out: the file of the figures, JSON.
        pairs: how many pairs are measured.
    """

    def __init__(self, out: str, pairs: int) -> None:
        self.out, self.pairs = Path(out), pairs
        self.rounds: list[dict[str, Any]] = []
        self.started = float(os.environ["BENCH_STARTED"])
        self.first_round = 0.0
        self.parts: dict[str, dict[str, float]] = {}
        self.watch: Stopwatch | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = FederatedLoop.of(trainer)
        loop.run.server.schedule.sampler = InPairs(loop.sampler)
        self.module = pl_module
        parts = [*loop.run.simulation.program.parts, *loop.run.server.parts]
        self.gc = [(part, part.axes_of) for part in parts if isinstance(part, LocalGC | GlobalGC)]
        self.program = loop.run.simulation.program
        # a graph of one method is wrong for the other
        self.memories = (
            self.program.memory,
            TrainingMemory(self.program.module, self.program.data, self.program.solver),
        )
        self._switch(False)
        self.before_first = time.time() - self.started

    def _switch(self, on: bool) -> None:
        self.program.memory = self.memories[on]
        for part, layers in self.gc:
            part.axes_of = layers if on else {}
        # A run of FedAvg has no hook after the backward pass.
        vars(self.module).pop("after_backward", None)
        if not on:
            self.module.after_backward = lambda left_out=(): None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop, t = FederatedLoop.of(trainer), trainer.global_step - 1
        self.first_round = self.first_round or time.time() - self.started
        watched = t >= WARM_UP + 2 * self.pairs
        if self.watch is not None:
            self.parts[METHODS[with_gc(t)]] = dict(self.watch.seconds)
        if t >= WARM_UP and not watched:
            row = {key: outputs[key] for key in ("time/train_s", "time/round_s", "train/samples")}
            self.rounds.append({"method": METHODS[with_gc(t)]} | row)
            if t % 2:
                both = self._plain(trainer, loop)
                for row in self.rounds[-2:]:
                    assert row["train/samples"] == both["samples"], (
                        "a pair and the plain loop need the same samples"
                    )
                    row |= both
        self._switch(on=with_gc(t + 1) == 1)  # for the next round
        if t + 1 >= WARM_UP + 2 * self.pairs:
            # a graph would not contain a clock
            if self.watch is None and trainer.strategy.root_device.type == "cpu":
                self.watch = Stopwatch()
                self.watch.install(trainer)
            if self.watch is not None:
                self.watch.clear()

    def _plain(self, trainer: Trainer, loop: FederatedLoop) -> dict[str, float]:
        """Trains the round's batches by the plain loop: the seconds of the slowest process, and all
        samples.
        """
        module, device = trainer.lightning_module, trainer.strategy.root_device
        t = trainer.global_step - 1
        round = loop.run.server.begin(t, loop.run.server.schedule.turn(t))
        with torch.inference_mode(False), torch.enable_grad():
            download = Download(
                round.index, round.seed, round.lr, round.broadcast_model, round.cohort
            )
            of_clients = ClientRound(self.program, download, StepHooks())
            stacks = loop.run.simulation.deal(
                of_clients, round.cohort, round.cohort, *rank_and_world()
            )
            plans = [
                loop.solver.plan(trainer.datamodule, clients, download, device)
                for clients in stacks
            ]
            trainer.strategy.barrier()
            autocast = trainer.precision_plugin.forward_context
            seconds = plain_seconds(
                module.net, trainer.datamodule, plans, loop.solver.optimizer, autocast
            )
        samples = float(sum(plan.counts.sum() for plan in plans))
        slowest, total = (
            _over_processes(trainer, seconds, "max"),
            _over_processes(trainer, samples, "sum"),
        )
        return {"plain_s": slowest, "samples": total}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device, net = trainer.strategy.root_device, pl_module.net
        half = str(trainer.precision) == "bf16-mixed"
        dtype = torch.bfloat16 if half else next(net.parameters()).dtype
        trainer.strategy.barrier()
        rate = _over_processes(trainer, gemm_rate(device, dtype), "sum")
        peak = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024)
            / 1e9
        )
        peak = _over_processes(trainer, peak, "sum")  # shared pages count in each process
        if not trainer.is_global_zero:
            return
        loop = FederatedLoop.of(trainer)
        with torch.inference_mode(False), torch.enable_grad():
            flops = training_flops(net, trainer.datamodule, device)
        of = {m: [r for r in self.rounds if r["method"] == m] for m in METHODS}
        figures: dict[str, Any] = {
            "processes": trainer.world_size,
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "precision": str(trainer.precision),
            "stack": loop.run.simulation.layout.k,
            "clients": trainer.datamodule.num_clients,
            "samples": median(r["samples"] for r in self.rounds),
            "mflop_per_sample": flops / 1e6,
            "gemm_gflops": rate / 1e9,
            "peak_gb": peak,
            "peak_gpu_gb": (
                torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
            ),
            "before_first_round_s": self.before_first,
            "first_round_done_s": self.first_round,
            "plain_samples_per_s": median(r["samples"] / r["plain_s"] for r in self.rounds),
            # Within pairs, since the machine's speed drifts between them.
            "gc_over_fedavg": median(
                g["time/train_s"] / f["time/train_s"]
                for f, g in zip(of["fedavg"], of["gcfed"], strict=True)
            ),
        }
        for method, rows in of.items():
            rate_of = median(r["samples"] / r["time/train_s"] for r in rows)
            figures[method] = {
                "samples_per_s": rate_of,
                "of_plain": median(r["plain_s"] / r["time/train_s"] for r in rows),
                "of_gemm": rate_of * flops / rate,
                "train_s": median(r["time/train_s"] for r in rows),
                "round_s": median(r["time/round_s"] for r in rows),
                "parts_s": self.parts.get(method, {}),
            }
        self.out.write_text(json.dumps(figures | {"rounds": self.rounds}, indent=1))


def _over_processes(trainer: Trainer, value: float, how: str) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=trainer.strategy.root_device)
    if trainer.world_size > 1:
        torch.distributed.all_reduce(total, getattr(torch.distributed.ReduceOp, how.upper()))
    return float(total)


def sit(
    workload: str,
    out: Path,
    overrides: Sequence[str],
    pairs: int | None = None,
    clients: int | None = None,
) -> None:
    """Runs a sitting in this process, and writes its figures to ``out``."""
    os.environ.setdefault("BENCH_STARTED", str(time.time()))
    pairs = pairs or WORKLOADS[workload].pairs
    cfg = compose_workload(workload, *overrides, clients=clients)
    with open_dict(cfg):
        cfg.rounds, cfg.eval_every = WARM_UP + 2 * pairs + 2, 1
        cfg.paths.output_dir = str(out.with_suffix(""))
        cfg.extras.figures = False
        del cfg.callbacks.progress
        cfg.callbacks.sitting = {
            "_target_": "benchmarks.sitting.Sitting",
            "out": str(out),
            "pairs": pairs,
        }
    train(cfg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--clients", type=int)
    args, overrides = parser.parse_known_args()
    sit(args.workload, args.out, overrides, args.pairs, args.clients)


if __name__ == "__main__":
    main()
