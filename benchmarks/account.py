"""Where the processor time of a round goes: ``python benchmarks/account.py`` prints a table.

The default run (digits) trains with FedAvg and with GC-Fed, in one process and in two. Each
process adds up the processor time of its main thread by phase, so the load of the machine and
waits hardly count. Further words are overrides of the config. One column counts other threads.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from omegaconf import open_dict  # noqa: E402

from benchmarks.stopwatch import Stopwatch  # noqa: E402
from benchmarks.workloads import by_phase, on_processors  # noqa: E402
from gcfed.federated.engine.client import ClientRound  # noqa: E402
from gcfed.federated.engine.loop import FederatedLoop  # noqa: E402
from gcfed.federated.engine.round_sums import RoundSums  # noqa: E402
from gcfed.federated.engine.server import Server  # noqa: E402
from gcfed.federated.parallel.shared import SharedSums  # noqa: E402
from gcfed.federated.training.local_training import LocalTraining  # noqa: E402
from gcfed.run import train  # noqa: E402

WARM_UP = 5
ROUNDS = 60
OTHER_THREADS = "other threads"
REST = "Lightning, and the rest"


class Account(Callback):
    """Writes the median seconds of each phase, over the rounds after the first ones.

    Args:
        out: the file of the figures, JSON; each process adds its rank.
    """

    def __init__(self, out: str) -> None:
        self.out = out
        self.rounds: list[dict[str, float]] = []
        self.watch = Stopwatch(time.thread_time, REST)
        self.others = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wrap(trainer)

    def _wrap(self, trainer: Trainer) -> None:
        watch = self.watch
        loop = FederatedLoop.of(trainer)
        simulation = loop.run.simulation
        module = loop.run.server.setup.module
        watch.wrap(loop.run.server.schedule, "turn", "round: schedule")
        for name in ("begin", "broadcast", "empty_sums"):
            watch.wrap(Server, name, "round: broadcast and empty sums")
        watch.wrap(simulation.program, "take_download", "round: hooks and dealing")
        watch.wrap(simulation, "deal", "round: hooks and dealing")
        watch.wrap(ClientRound, "_drawn", "client: batches drawn")
        watch.wrap(ClientRound, "_begin_training", "client: memory and preparation")
        watch.wrap(ClientRound, "_prepare", "client: memory and preparation")
        watch.wrap(loop.solver, "train", "local steps")
        watch.wrap(LocalTraining, "mean_losses", "client: upload")
        watch.wrap(ClientRound, "train", "client: upload")
        watch.wrap(Server, "receive", "client: sums")
        watch.wrap(RoundSums, "received", "round: sums of all processes")
        watch.wrap(SharedSums, "add", "exchange")
        watch.wrap(SharedSums, "wait_for_all", "wait for the other process")
        for name in ("reduce", "keep_states", "edit_update", "step"):
            watch.wrap(Server, name, "round: server's step")
        watch.wrap(module, "test", "test")
        watch.wrap(loop.run, "_add_columns", "row of metrics")
        watch.wrap(loop, "on_train_batch_end", "row of metrics")
        watch.wrap_checkpoint(trainer)
        watch.wrap(module, "training_step", "round: rest")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.watch.charge()
        others = time.process_time() - time.thread_time()
        if trainer.global_step > WARM_UP:
            of_round = dict(self.watch.seconds)
            self.rounds.append(of_round | {OTHER_THREADS: others - self.others})
        self.others = others
        self.watch.seconds.clear()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        phases = {phase for row in self.rounds for phase in row}
        medians = {phase: median(row.get(phase, 0.0) for row in self.rounds) for phase in phases}
        Path(f"{self.out}.{trainer.global_rank}").write_text(json.dumps(medians))


def measure(method: str, processes: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    """The seconds of each phase, of each process."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/account"
        command = [sys.executable, __file__, "--one", method, str(processes), out, *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": str(processes), "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(processes)]


def run(method: str, processes: int, out: str, overrides: Sequence[str]) -> None:
    from gcfed.api import configure

    words = [f"algorithm={method}", f"rounds={ROUNDS}", "extras.figures=false"]
    words += [*on_processors(processes), *overrides]
    cfg = configure(*words, folder=f"{out}_run")
    with open_dict(cfg):
        cfg.callbacks.account = {"_target_": "benchmarks.account.Account", "out": out}
    train(cfg, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "PROCESSES", "OUT"))
    args, overrides = parser.parse_known_args()
    if args.one:
        method, processes, out = args.one
        run(method, int(processes), out, overrides)
        return
    columns = {}
    for processes in (1, 2):
        for method in ("fedavg", "gcfed"):
            for rank, figures in enumerate(measure(method, processes, overrides)):
                columns[f"{method}, {rank + 1} of {processes}"] = figures
    print(by_phase("µs of processor time", 1e6, 0, columns))


if __name__ == "__main__":
    main()
