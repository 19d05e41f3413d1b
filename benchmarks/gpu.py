"""The first minutes on a GPU: ``python benchmarks/gpu.py --out FOLDER`` prints figures and writes
them after each part.

The parts run in groups, each in a process of its own, because an error of CUDA spoils all later
work of its process. The most important groups come first, in case time runs out. ``--call 1`` and
``--call 2`` run half of the groups each, in less than ten minutes (GPU.md). The folder gets
figures.json, kernels.json (the kernels of a client's local steps: name, number per step,
microseconds) and tests.txt. Further words are overrides. ``--dry`` tries all parts with tiny runs
on a CPU. ``--group w1`` runs one group, in this process.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from lightning.pytorch import Callback, Trainer  # noqa: E402
from omegaconf import open_dict  # noqa: E402

from benchmarks import sitting  # noqa: E402
from benchmarks.plain import synchronize  # noqa: E402
from benchmarks.workloads import WORKLOADS, compose_workload  # noqa: E402
from gcfed.federated.engine import layout as of_stacks  # noqa: E402
from gcfed.federated.parallel.sums import NARROW, Grid  # noqa: E402
from gcfed.run import RunResult, train  # noqa: E402

#: The tests for a GPU. Other files of tests need packages that a borrowed machine may not have.
TESTS = ("tests/test_cuda.py", "-q", "-m", "cuda")
ROUNDS = ("rounds=40", "eval_every=40", "callbacks.checkpoint.every=40")
BF16, TF32, STRICT = "precision=bf16-mixed", "precision_matmul=high", "+trainer.deterministic=warn"
#: Name → overrides, streams, and whether convolutions may use TF32.
LAYOUTS: dict[str, tuple[tuple[str, ...], int, bool]] = {
    "eager, one at a time": (("client.stack=1", "client.graphs=false", "rounds=6"), 1, False),
    "graphs, one at a time": (("client.stack=1",), 1, False),
    "graphs, a stack of five": (("client.stack=5",), 1, False),
    "graphs, five streams": (("client.stack=1",), 5, False),
    "graphs, five streams, TF32": (("client.stack=1", TF32), 5, True),
    "graphs, five streams, bf16": (("client.stack=1", BF16), 5, False),
}
DRY = (
    "trainer=cpu",
    "trainer.devices=1",
    "data.limit_train=80",
    "data.limit_test=20",
    "participation.num_clients=5",
    "participation.per_round=2",
    "client.steps=2",
    "rounds=2",
    "eval_every=2",
)
#: The groups of each call, and their limits in seconds. A call may last ten minutes, and starts
#: take some of them.
CALLS = {
    1: {"tests": 150, "w1": 240, "plain": 150},
    2: {"w2 to w4": 150, "transformers": 100, "w6, w7": 120, "memory": 150},
}
Part = Callable[[], Any]


def groups(*more: str) -> dict[str, dict[str, Part]]:
    """The parts of each group, name → figures. ``more`` are overrides of all runs."""
    scaffold = ("algorithm=scaffold", "gc=none")

    def timed(workload: str, *words: str) -> Part:
        return lambda: seconds(run(workload, *ROUNDS, *words, *more))

    kernels = {
        f"kernels, {name}": partial(profiled, *words, *more)
        for name, words in (("float32", ()), ("TF32", (TF32,)), ("bf16", (BF16,)))
    }
    return {
        "w1": {
            **{name: partial(layout, *settings, *more) for name, settings in LAYOUTS.items()},
            **kernels,
            "floor": timed("w1", "client.steps=1"),
            "floor, tested each round": timed("w1", "client.steps=1", "rounds=20", "eval_every=1"),
            "waits": partial(waits, *more),
            "equal runs": partial(equal, *more),
            "equal runs, deterministic": partial(equal, STRICT, *more),
            "deterministic": timed("w1", STRICT),
        },
        "plain": {
            "of the plain loop, w1": partial(of_plain, "w1", *more),
            "of the plain loop, w4": partial(of_plain, "w4", *more),
            "sums": sums,
        },
        "w2 to w4": {
            "w2": timed("w2", "rounds=60"),
            "w3": timed("w3", "rounds=12"),
            "w4": timed("w4"),
            "states, SCAFFOLD": timed("w1", *scaffold),
            "states, MOON": timed("w1", "algorithm=moon", "gc=none"),
        },
        "transformers": {
            "vit": timed("vit"),
            "vit, one at a time": timed("vit", "client.stack=1"),
            "gpt": timed("gpt"),
            "gpt, one at a time": timed("gpt", "client.stack=1"),
        },
        "w6, w7": {
            "minutes, w6": partial(minutes, "w6", 10, *more),
            "minutes, w7": partial(minutes, "w7", 50, *more),
        },
        "memory": {
            **{
                name: partial(memory, workload, *words, *more)
                for name, workload, *words in (
                    ("GB, w1", "w1"),
                    ("GB, SCAFFOLD", "w1", *scaffold),
                    ("GB, SSF", "w1", "algorithm=ssf", "gc=none"),
                    ("GB, w2", "w2"),
                    ("GB, w3", "w3"),
                    *(
                        (
                            f"GB, {n} rounds",
                            "w1",
                            "client.steps=3",
                            f"rounds={n}",
                            f"eval_every={n}",
                            f"callbacks.checkpoint.every={n}",
                        )
                        for n in (100, 1500)
                    ),
                )
            },
        },
    }


def run(workload: str, *overrides: str) -> RunResult:
    """One run of a workload, without pictures."""
    where = () if any(word.startswith("trainer=") for word in overrides) else ("trainer=gpu",)
    cfg = compose_workload(workload, *where, "extras.figures=false", "logger=csv", *overrides)
    with tempfile.TemporaryDirectory() as folder:
        with open_dict(cfg):
            cfg.paths.output_dir = f"{folder}/run"
        return train(cfg, quiet=True)


def seconds(result: RunResult) -> dict[str, float]:
    """Medians over the second half of a run: seconds of a round and of its training, and µs of a
    local step: over all steps of the round, and over those of the longest client.
    """
    rows, loop = result.frame.iloc[len(result.frame) // 2 :], result.loop
    train_s, count = rows["time/train_s"], result.trainer.datamodule.num_clients
    cohorts = [loop.sampler(t - 1, count, loop.seed) for t in rows.index]
    longest = [loop.run.simulation.planned(cohort).max() for cohort in cohorts]
    figures = {
        "round_s": rows["time/round_s"],
        "train_s": train_s,
        "step_us": 1e6 * train_s / rows["train/steps"],
        "longest_us": 1e6 * train_s / longest,
    }
    return {name: float(values.median()) for name, values in figures.items()}


def layout(words: tuple[str, ...], streams: int, tf32: bool, *more: str) -> dict[str, float]:
    """W1 with these settings."""
    plain = of_stacks.Layout
    before = torch.backends.cudnn.allow_tf32

    def limited(k: int, device: torch.device, num_streams: int) -> of_stacks.Layout:
        return plain(k, device, min(num_streams, streams))

    of_stacks.Layout = limited
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        return seconds(run("w1", *ROUNDS, *words, *more))
    finally:
        of_stacks.Layout = plain
        torch.backends.cudnn.allow_tf32 = before


def of_plain(workload: str, *words: str) -> dict[str, Any]:
    """A sitting of three pairs: samples per second of the plain loop, of FedAvg and of GC-Fed, and
    their shares of it.
    """
    where = () if any(word.startswith("trainer=") for word in words) else ("trainer=gpu",)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sitting.json"
        sitting.sit(workload, out, [*where, *words], pairs=3)
        found = json.loads(out.read_text())
    figures = {"plain_samples_per_s": found["plain_samples_per_s"]}
    for method in sitting.METHODS:
        for name in ("samples_per_s", "of_plain"):
            figures[f"{method}_{name}"] = found[method][name]
    return figures


def sums() -> dict[str, float]:
    """Milliseconds to add the updates of five clients with ten million parameters, with the coarse
    grid of the sums and without it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 10**7 if device.type == "cuda" else 10**3
    like = {"w": torch.zeros(size, device=device)}
    values_K = {"w": torch.randn(5, size, device=device)}
    weight_K = torch.full((5,), 0.2, dtype=torch.float64, device=device)
    figures = {}
    for name in ("with", "without"):
        grid = Grid(like, NARROW)
        if name == "without":
            grid._move_large = lambda piece, start: None  # type: ignore[method-assign]
        grid._add_on_gpu(values_K, weight_K)
        synchronize(device)
        started = time.perf_counter()
        for _ in range(10):
            grid._add_on_gpu(values_K, weight_K)
        synchronize(device)
        figures[f"{name}_ms"] = 100 * (time.perf_counter() - started)
    return figures


def minutes(workload: str, every: int, *more: str) -> float:
    """Estimates the minutes of 1,500 rounds, with a test in each ``every``-th, from the second half
    of a short run.
    """
    words = (
        f"rounds={4 * every}",
        f"eval_every={every}",
        f"callbacks.checkpoint.every={4 * every}",
    )
    rounds = run(workload, *words, *more).frame["time/round_s"]
    return float(rounds.iloc[len(rounds) // 2 :].mean()) * 1500 / 60


class Profiled(Callback):
    """Profiles the last round but one: most of its graphs are recorded, and it has no test."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == max(1, trainer.max_steps - 2):
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # do not count work left over from the round before
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        elif trainer.global_step == trainer.max_steps - 1 or trainer.max_steps < 3:
            self.profiler.stop()


def profiled(*words: str) -> dict[str, Any]:
    """The kernels of a round of one client of W1, most time first, and the share of time in which
    the device works.
    """
    one = ("client.stack=1", "participation.per_round=1", "client.steps=20")
    result = run(
        "w1", *ROUNDS, *one, "+callbacks.profiled._target_=benchmarks.gpu.Profiled", *words
    )
    callbacks: Any = result.trainer.callbacks
    # By name: if this module runs as a script, the class exists twice.
    (profiler,) = (
        callback.profiler for callback in callbacks if type(callback).__name__ == "Profiled"
    )
    kind = (
        torch.autograd.DeviceType.CUDA
        if torch.cuda.is_available()
        else torch.autograd.DeviceType.CPU
    )
    events = [e for e in profiler.events() if e.device_type == kind]
    table: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy, first = 0.0, min(e.time_range.start for e in events)
    reached = first
    for event in sorted(events, key=lambda e: e.time_range.start):  # overlapping kernels count once
        start, end = event.time_range.start, event.time_range.end
        table[event.name][0] += 1
        table[event.name][1] += end - start
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    steps = float(result.frame["train/steps"].iloc[-1])
    kernels = [{"name": name, "per_step": n / steps, "us": us} for name, (n, us) in table.items()]
    kernels.sort(key=lambda kernel: -float(kernel["us"]))
    return {"busy": busy / (reached - first), "per_step": len(events) / steps, "kernels": kernels}


def waits(*more: str) -> dict[str, int]:
    """How often each line waits for the device in a run of three rounds of W1, including its start
    and end.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run("w1", "rounds=3", "eval_every=3", *more)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchron" in str(w.message))
    return {place.removeprefix(f"{ROOT}/"): number for place, number in lines.most_common()}


def equal(*more: str) -> list[bool]:
    """Whether a second, third and fourth run of W1 have the weights of the first
    one, bit for bit.
    """
    first, *others = (list(run("w1", "rounds=2", *more).model.parameters()) for _ in range(4))
    return [all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) for other in others]


def memory(workload: str, *words: str) -> dict[str, float]:
    """The device's peak memory in GB: what tensors use, what the allocator reserves; and how often
    it had to retry.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(workload, "rounds=2", *words)
    peaks = {
        "used": torch.cuda.max_memory_allocated() / 1e9,
        "reserved": torch.cuda.max_memory_reserved() / 1e9,
    }
    return peaks | {"retries": torch.cuda.memory_stats().get("num_alloc_retries", 0)}


def tests(out: Path) -> str:
    """What pytest says about the tests for a GPU. Its whole output is in tests.txt."""
    command = [sys.executable, "-m", "pytest", *TESTS, "-n", "4"]
    with (out / "tests.txt").open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=CALLS[1]["tests"]
        )
    meaning = {0: "passed", 1: "some failed"}.get(
        code.returncode, f"no result, pytest ended with {code.returncode}"
    )
    return f"{meaning}: {(out / 'tests.txt').read_text().strip().rpartition(chr(10))[2]}"


def measure(parts: dict[str, Part], out: Path) -> None:
    """Runs these parts, and writes the figures after each part."""
    for name, part in parts.items():
        started = time.perf_counter()
        try:
            found = part()
        except Exception as error:  # go on with the other parts
            found = f"{type(error).__name__}: {error}"
        if isinstance(found, dict) and "kernels" in found:
            add(out / "kernels.json", {name: found.pop("kernels")})
        print(f"{name}: {found}  ({time.perf_counter() - started:.0f} s)", flush=True)
        add(out / "figures.json", {name: found})


def run_groups(call: int, dry: bool) -> None:
    """Runs the groups of a call, each in a process of its own."""
    for name, limit in CALLS[call].items():
        if dry and name == "tests":
            continue
        try:
            subprocess.run([sys.executable, *sys.argv, "--group", name], timeout=limit)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after its time limit")


def add(path: Path, figures: dict[str, Any]) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | figures, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "logs" / "benchmarks" / "gpu")
    parser.add_argument("--call", type=int, choices=CALLS)
    parser.add_argument("--group", choices=["tests", *groups()])
    parser.add_argument("--dry", action="store_true")
    args, words = parser.parse_known_args()
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit(
            "There is no GPU on this machine; benchmarks/run.py is for CPUs. --dry tries this"
            " script."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.group is None:
        for call in [args.call] if args.call else CALLS:
            run_groups(call, args.dry)
        return
    if args.dry:
        words += DRY
        WORKLOADS.update(dict.fromkeys(WORKLOADS, WORKLOADS["digits"]))
    device = "none" if args.dry else torch.cuda.get_device_name()
    add(args.out / "figures.json", {"torch": torch.__version__, "device": device})
    measure(
        (
            {"tests": partial(tests, args.out)}
            if args.group == "tests"
            else groups(*words)[args.group]
        ),
        args.out,
    )


if __name__ == "__main__":
    main()
