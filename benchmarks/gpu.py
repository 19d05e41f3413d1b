"""The first minutes on a GPU: ``python benchmarks/gpu.py`` prints a table and writes it and all figures.

The most important parts come first, in case time runs out: the tests for a GPU; W1 in each layout and precision; how
far the host runs ahead of graphs; the floor of a round; waits for the device by line; whether equal runs give equal
weights; other workloads; two workloads of other simulators, in minutes; memory. Further words are overrides; ``--out``
names the folder, and ``--tests no`` skips the tests.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from lightning.pytorch import Callback, Trainer  # noqa: E402
from omegaconf import open_dict  # noqa: E402

from benchmarks.workloads import compose_workload  # noqa: E402
from gcfed.federated.graphs import streams as lanes  # noqa: E402
from gcfed.federated.graphs.recorder import Graph  # noqa: E402
from gcfed.run import RunResult, train  # noqa: E402
from gcfed.runs.reading import read_metrics  # noqa: E402

ROUNDS = ("rounds=40", "eval_every=40", "callbacks.checkpoint.every=40")
#: Name → overrides, streams, and whether convolutions may use TF32.
LAYOUTS: dict[str, tuple[tuple[str, ...], int, bool]] = {
    "eager, one at a time": (("client.stack=1", "client.graphs=false", "rounds=6"), 1, False),
    "eager, a stack of five": (("client.stack=5", "client.graphs=false", "rounds=6"), 1, False),
    "graphs, one at a time": (("client.stack=1",), 1, False),
    "graphs, a stack of five": (("client.stack=5",), 1, False),
    "graphs, five streams": (("client.stack=1",), 5, False),
    "graphs, five streams, TF32": (("client.stack=1", "precision_matmul=high"), 5, True),
    "graphs, five streams, bf16": (("client.stack=1", "precision=bf16-mixed"), 5, False),
}


#: The tests for a GPU. Other files of tests need packages that a borrowed machine may not have.
TESTS = ("tests/test_cuda.py", "-q", "-m", "cuda", "-n", "0")


def tests() -> str:
    """How many of the tests for a GPU pass: the last line of pytest."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *TESTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout + done.stderr)
    return done.stdout.strip().rpartition("\n")[2]


def run(folder: Path, workload: str, *overrides: str, trainer: str = "gpu") -> RunResult:
    """One run of a workload, without pictures."""
    cfg = compose_workload(workload, f"trainer={trainer}", "extras.figures=false", "logger=csv", *overrides)
    with open_dict(cfg):
        cfg.paths.output_dir, cfg.callbacks.progress = str(folder), None
    return train(cfg)


def minutes(folder: Path, workload: str, rounds: int, eval_every: int, *overrides: str, trainer: str = "gpu") -> float:
    """Estimates the minutes of so many rounds with their tests from the rounds between the first test and the third."""
    run(folder, workload, f"rounds={3 * eval_every}", f"eval_every={eval_every}", *overrides, trainer=trainer)
    rows = read_metrics(folder / "metrics.csv").iloc[eval_every:]
    return float(rows["time/round_s"].mean()) * rounds / 60


def seconds(folder: Path) -> dict[str, float]:
    """Medians over the second half of a run: seconds of a round and of its training, and µs of a local step."""
    rows = read_metrics(folder / "metrics.csv")
    rows = rows.iloc[len(rows) // 2 :]
    step = (rows["time/train_s"] / rows["train/steps"]).median() * 1e6
    medians = {"round_s": rows["time/round_s"].median(), "train_s": rows["time/train_s"].median(), "step_us": step}
    return {name: float(value) for name, value in medians.items()}


def layouts(out: Path, *overrides: str, trainer: str = "gpu") -> dict[str, Any]:
    """W1 in each layout."""
    found: dict[str, Any] = {}
    before = lanes.STREAMS, torch.backends.cudnn.allow_tf32
    for i, (name, (more, streams, tf32)) in enumerate(LAYOUTS.items()):
        lanes.STREAMS, torch.backends.cudnn.allow_tf32 = streams, tf32
        try:
            run(out / f"layout_{i}", "w1", *ROUNDS, *more, *overrides, trainer=trainer)
            found[name] = seconds(out / f"layout_{i}")
        except Exception as error:  # such as too little memory for a stack
            found[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {found[name]}", flush=True)
    lanes.STREAMS, torch.backends.cudnn.allow_tf32 = before
    return found


def ahead(replays: int = 1000) -> dict[str, float]:
    """Seconds until the host has enqueued so many graphs of a small step, and until the device has run them."""
    x = torch.randn(50, 512, device="cuda")
    weights = [torch.randn(512, 512, device="cuda") for _ in range(20)]
    with torch.cuda.stream(torch.cuda.Stream()):

        def step() -> None:
            y = x
            for weight in weights:
                y = y @ weight

        step()
        replay = Graph().record(step)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(replays):
            replay()
        host = time.perf_counter() - started
        torch.cuda.synchronize()
    return {"replays": replays, "host_s": host, "device_s": time.perf_counter() - started}


class Profiled(Callback):
    """Profiles only the last round but one: most of its graphs are recorded, and it has no test."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == trainer.max_steps - 2:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # do not count work left over from the round before
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        elif trainer.global_step == trainer.max_steps - 1:
            self.profiler.stop()


def profiled(out: Path, *overrides: str, workload: str = "w1", trainer: str = "gpu") -> dict[str, float]:
    """Profiles a round of W1: writes ``trace.json``, and returns the share of time in which the device is busy."""
    words = (*ROUNDS, "+callbacks.profiled._target_=benchmarks.gpu.Profiled")
    result = run(out / "profiled", workload, *words, *overrides, trainer=trainer)
    callbacks: Any = result.trainer.callbacks
    # By name: if this module runs as a script, the class exists twice.
    (profiler,) = (callback.profiler for callback in callbacks if type(callback).__name__ == "Profiled")
    profiler.export_chrome_trace(str(out / "trace.json"))
    device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in device)
    busy, reached = 0.0, 0.0
    for start, end in spans:  # overlapping streams count once
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {"busy": busy / (reached - spans[0][0]) if spans else 0.0}


def waits(out: Path, *overrides: str) -> dict[str, int]:
    """How often each line waits for the device in a run of three rounds of W1, including its start and end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(out / "waits", "w1", "rounds=3", "eval_every=3", *overrides)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchron" in str(w.message))
    return {place.removeprefix(f"{ROOT}/"): number for place, number in lines.most_common()}


def equal(out: Path, *overrides: str, trainer: str = "gpu") -> bool:
    """Whether two runs with the same settings have the same weights, bit for bit."""
    one, two = (run(out / f"equal_{i}", "w1", "rounds=2", *overrides, trainer=trainer) for i in (1, 2))
    pairs = zip(one.module.net.parameters(), two.module.net.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def memory(out: Path, algorithm: str) -> float:
    """The peak memory of the device in W1, in GB."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    run(out / f"memory_{algorithm}", "w1", f"algorithm={algorithm}", "gc=none", "rounds=2")
    return torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "logs" / "benchmarks" / "gpu")
    parser.add_argument("--tests", choices=("yes", "no"), default="yes")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU on this machine; benchmarks/run.py is for CPUs.")
    out, more = args.out, tuple(args.overrides)
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts: dict[str, Any] = {
        "tests": tests,
        "layouts": lambda: layouts(out, *more),
        "host ahead of graphs": ahead,
        "profiled": lambda: profiled(out, *more),
        **{
            name: (lambda n=name, o=o: (run(out / n, "w1", *o, "client.steps=1", *more), seconds(out / n))[1])
            for name, o in (("floor", ROUNDS), ("floor, tested each round", ("rounds=20",)))
        },
        "waits": lambda: waits(out, *more),
        "equal runs": lambda: equal(out, *more),
        **{
            name: (lambda n=name, w=workload, o=o: (run(out / n, w, *ROUNDS, *o, *more), seconds(out / n))[1])
            for name, workload, o in (
                ("w2", "w2", ()), ("w4", "w4", ()), ("scaffold", "w1", ("algorithm=scaffold", "gc=none"))
            )
        },
        "minutes, w6": lambda: minutes(out / "w6", "w6", 1500, 10, "callbacks.checkpoint.every=1500", *more),
        "minutes, w7": lambda: minutes(out / "w7", "w7", 1500, 50, "callbacks.checkpoint.every=1500", *more),
        "GB, SCAFFOLD": lambda: memory(out, "scaffold"),
        "GB, SSF": lambda: memory(out, "ssf"),
    }  # fmt: skip
    for name, part in parts.items():
        if name == "tests" and args.tests == "no":
            continue
        started = time.perf_counter()
        try:
            figures[name] = part()
        except Exception as error:  # go on with the other workloads
            figures[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {figures[name]}  ({time.perf_counter() - started:.0f} s)", flush=True)
        (out / "figures.json").write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
