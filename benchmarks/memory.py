"""How many models a process holds: ``python benchmarks/memory.py`` prints the table of
docs/performance.md. ``--processes 2`` divides each run among two processes, and prints the most of
them.

Each run is a process of its own, which trains five of twenty clients for two rounds on synthetic
data. A thread reads its anonymous memory (``RssAnon``, Linux only) every two milliseconds. What
it has before the run begins is subtracted, and the rest is divided by the size of the model.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

from benchmarks.workloads import on_processors  # noqa: E402
from gcfed.api import configure  # noqa: E402
from gcfed.run import train  # noqa: E402

#: Name → overrides.
NETWORKS = {
    "a user's MLP, 25 M": ("model=own", "model._target_=benchmarks.memory.OwnMLP"),
    "the project's MLP, 25 M": ("model=mlp", "model.hidden=[4096,4096,1024]"),
    "ResNet18, 11 M": ("model=resnet18",),
}
METHODS = ("fedavg", "scaffold")
SMALL = (
    "data=synthetic",
    "data.input_shape=[3,16,16]",
    "data.num_classes=10",
    "data.dataset.num_train=400",
    "data.dataset.num_test=20",
    "partition=iid",
    "participation.num_clients=20",
    "participation.per_round=5",
    "rounds=2",
    "client.steps=2",
    "client.batch_size=10",
)
QUIET = ("logger=none", "extras.figures=false")


class OwnMLP(torch.nn.Sequential):
    """A network that the engine does not know."""

    def __init__(self) -> None:
        widths = (768, 4096, 4096, 1024, 10)
        layers: list[torch.nn.Module] = [torch.nn.Flatten()]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        super().__init__(*layers[:-1])


class Watch(threading.Thread):
    """Reads the process's anonymous memory until it is stopped.

    Attributes:
        peak: the most bytes that it has seen.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.running = True

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.002)


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("/proc/self/status has no RssAnon: this benchmark needs Linux.")


class Mark(Callback):
    """Watches each process of a run.

    Each writes its peaks in bytes, before the first round and in all, and the size of a model.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.watch = Watch()
        self.watch.start()
        self.before_rounds = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before_rounds = self.watch.peak
        if trainer.global_rank > 0:  # a fork loses the thread
            self.watch = Watch()
            self.watch.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.running = False
        model_bytes = sum(p.nbytes for p in pl_module.parameters())
        numbers = [self.before_rounds, self.watch.peak, model_bytes]
        Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(numbers))


def models(*overrides: str, processes: int = 1) -> tuple[float, float]:
    """The peaks before the first round and in all, in models; the most of a run's processes."""
    marked = "+callbacks.mark._target_=benchmarks.memory.Mark"
    with tempfile.TemporaryDirectory() as folder:
        # what is imported late belongs to no model
        train(
            configure("rounds=1", *on_processors(1), *QUIET, folder=f"{folder}/first"), quiet=True
        )
        start = anonymous_bytes()
        words = [*SMALL, *overrides, marked, f"+callbacks.mark.folder={folder}"]
        words += [*on_processors(processes), *QUIET]
        train(configure(*words, folder=f"{folder}/run"), quiet=True)
        peaks = []
        for file in Path(folder).glob("*.json"):
            *both, model_bytes = json.loads(file.read_text())
            peaks.append([(peak - start) / model_bytes for peak in both])
    before_rounds, run = map(max, zip(*peaks, strict=True))
    return before_rounds, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "METHOD"))
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.one:
        network, method = args.one
        words = (*NETWORKS[network], f"algorithm={method}")
        before, run = models(*words, processes=args.processes)
        print(f"| {' | '.join(args.one)} | {before:.1f} | {run:.1f} |", flush=True)
        return
    print("| network | algorithm | before the first round | run |\n|---|---|---|---|", flush=True)
    for network in NETWORKS:
        for method in METHODS:
            command = [sys.executable, __file__, "--one", network, method]
            command += ["--processes", str(args.processes)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
