"""The benchmarks run and print all their figures. No test asserts a speed."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import forked
from lightning.pytorch import Callback

from benchmarks import account, gpu, kernels, peers, plain, run, sitting, workloads
from benchmarks.stopwatch import Stopwatch
from gcfed.models.build import build_net
from gcfed.utils.resolvers import ROOT

LACKING = ("nbformat", "nbconvert", "hatchling", "wandb", "mlflow", "optuna")
PARTS = {
    "forward",
    "backward",
    "step",
    "hooks",
    "batch",
    "broadcast",
    "aggregate",
    "evaluate",
    "checkpoint",
    "loop",
}


@pytest.fixture
def bench(monkeypatch, capsys):
    """``bench(words)`` returns the output of ``python benchmarks/run.py <words>``.

    A sitting is a separate process.
    """

    def sit(command, env, stdout, **_):
        def call():
            os.environ.update(env)
            sys.argv = command[2:]
            runpy.run_module(command[2], run_name="__main__")

        return SimpleNamespace(returncode=forked(call, Path(stdout.name)))

    monkeypatch.setattr(run, "subprocess", SimpleNamespace(run=sit, STDOUT=None))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        run.main()
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_a_sitting_measures_both_methods_and_the_plain_loop(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "SHAPES", [(256, 256, 256)])  # smaller matrix products
    said = bench(
        "digits", "--pairs", "2", "--layout", "2x1", "--out", str(tmp_path), "data.limit_train=100"
    )
    assert "| GC-Fed |" in said
    assert (tmp_path / "table.md").read_text() in said
    (figures,) = json.loads((tmp_path / "figures.json").read_text())
    assert figures["processes"] == 2
    assert figures["threads"] == 1
    assert figures["precision"] == "32-true"
    assert [rows["method"] for rows in figures["rounds"]] == ["gcfed", "fedavg", "fedavg", "gcfed"]
    samples = [rows["train/samples"] for rows in figures["rounds"]]
    # in the same cohort
    assert samples[::2] == samples[1::2] == [rows["samples"] for rows in figures["rounds"][::2]]
    for rows in figures["rounds"]:
        assert rows["plain_s"] > 0
        assert rows["time/round_s"] > rows["time/train_s"] > 0
    parts = figures["gcfed"]["parts_s"]
    assert parts.keys() >= PARTS
    assert min(parts[name] for name in PARTS) > 0  # zero would mean that it was not measured
    assert 0 < figures["gcfed"]["of_gemm"] < 1
    # Each weight has three products of two operations. The first layer has only two: its inputs
    # need no gradient.
    assert figures["mflop_per_sample"] == pytest.approx(
        2e-6 * (2 * 64 * 512 + 3 * (512 * 256 + 256 * 10))
    )
    assert figures["first_round_done_s"] > figures["before_first_round_s"] > 0


class Watched(Callback):
    """Writes the seconds of a :class:`Stopwatch`."""

    def __init__(self, out):
        self.out = out
        self.watch = Stopwatch()

    def on_train_start(self, trainer, pl_module):
        self.watch.install(trainer)

    def on_train_end(self, trainer, pl_module):
        Path(self.out).write_text(json.dumps(self.watch.seconds))


def test_both_clocks_find_what_they_wrap_and_measure_each_part_of_a_round(tmp_path):
    """They wrap the engine by name. A rename there ends the run, or leaves a part without time."""
    words = (
        "rounds=3",
        "model.hidden=[12,8]",
        "participation.num_clients=4",
        "participation.per_round=2",
        "client.epochs=1",
        "data.limit_train=70",
        "data.limit_test=20",
        f"+callbacks.watched._target_={__name__}.Watched",
        f"+callbacks.watched.out={tmp_path / 'watched.json'}",
    )

    def measured():
        account.WARM_UP = 1
        account.run("gcfed", 1, str(tmp_path / "account"), words)

    printed = tmp_path / "printed.txt"
    assert forked(measured, printed) == 0, printed.read_text()
    phases = json.loads((tmp_path / "account.0").read_text())
    of_two_processes = {"exchange", "wait for the other process"}
    assert phases.keys() == wrapped_phases() - of_two_processes
    parts = json.loads((tmp_path / "watched.json").read_text())
    assert parts.keys() >= PARTS
    assert min(parts[name] for name in PARTS) > 0


def wrapped_phases():
    """The phases that :class:`account.Account` names."""
    text = Path(account.__file__).read_text()
    named = re.findall(r'watch\.wrap\(.*, "([^"]+)"\)', text)
    return {*named, account.REST, account.OTHER_THREADS, "checkpoint"}


def test_rounds_of_fedavg_call_no_hook_of_gcfed(monkeypatch):
    """With a hook after the backward pass, even an empty one, a client trains more slowly."""

    class Module:
        def after_backward(self):
            return print  # any function: the hook of a run with GC

    monkeypatch.setenv("BENCH_STARTED", "0")
    measured = sitting.Sitting("figures.json", 1)
    measured.module = Module()
    measured.program = SimpleNamespace()
    measured.memories = (None, None)
    measured.gc = [(SimpleNamespace(axes_of={}), {"weight": 2})]
    for on in (False, True, False):
        measured._switch(on)
        hook = measured.module.after_backward()
        assert hook is (print if on else None)
        assert bool(measured.gc[0][0].axes_of) == on


@pytest.mark.parametrize(("algorithm", "stack"), [("fedavg", 1), ("scaffold", 5)])
def test_a_step_has_as_many_kernels_as_the_table_on_the_page(algorithm, stack):
    rows = re.findall(
        r"^\| (.*) \| (\d+) \| (\d+) \|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE
    )
    ((alone, five),) = [numbers for names, *numbers in rows if f"`{algorithm}`" in names]
    assert kernels.count(algorithm, stack) == pytest.approx(
        int(alone if stack == 1 else five), rel=0.1
    )


def test_each_kind_of_gpu_benchmark_runs_on_a_cpu(tmp_path):
    chosen = {
        "w1": ("graphs, five streams, bf16", "kernels, TF32", "floor", "waits", "equal runs"),
        "plain": ("of the plain loop, w1", "sums"),
        "w2 to w4": ("states, MOON",),
        "transformers": ("vit",),
        "w6, w7": ("minutes, w6",),
        "memory": ("GB, w1",),
    }

    def tried():
        # the profiler would import the compiler, for three seconds
        torch._lazy_modules.discard("_inductor")
        groups = gpu.groups
        gpu.groups = lambda *words: {
            g: {n: groups(*words)[g][n] for n in names} for g, names in chosen.items()
        }
        gpu.subprocess = SimpleNamespace(run=lambda command, timeout: call(*command[2:]))
        call("--out", str(tmp_path), "--dry")

    def call(*words):
        sys.argv = ["gpu.py", *words]
        gpu.main()

    assert forked(tried, tmp_path / "printed.txt") == 0, (tmp_path / "printed.txt").read_text()
    found = json.loads((tmp_path / "figures.json").read_text())
    assert list(found) == [
        "torch",
        "device",
        *(name for names in chosen.values() for name in names),
    ]
    # only on GPUs
    assert [name for name, figures in found.items() if "Error" in str(figures)] == [
        "waits",
        "GB, w1",
    ]
    assert found["of the plain loop, w1"]["gcfed_of_plain"] > 0
    assert found["sums"]["without_ms"] > 0
    floor = found["floor"]
    assert floor["round_s"] >= floor["train_s"] > 0
    # two clients with the same number of steps
    assert floor["longest_us"] == pytest.approx(2 * floor["step_us"])
    assert found["equal runs"] == [True, True, True]
    (kernels,) = json.loads((tmp_path / "kernels.json").read_text()).values()
    assert kernels[0]["us"] >= kernels[1]["us"] > 0


def test_a_call_for_a_gpu_ends_within_ten_minutes():
    """Each group is in one call; the machine's start and the packages need half a minute."""
    assert sorted(name for call in gpu.CALLS.values() for name in call) == sorted(
        ["tests", *gpu.groups()]
    )
    page = (ROOT / "benchmarks/GPU.md").read_text()
    for call, limits in gpu.CALLS.items():
        assert sum(limits.values()) <= 570
        stated = ", ".join(f"{name} {seconds}" for name, seconds in limits.items())
        assert f"--call {call} --out $OUT` | {stated} |" in page


@pytest.mark.parametrize(
    ("name", "cohort", "samples", "parameters", "batches"),
    [("w6", 50, 2500, 1_626_442, 5), ("w7", 10, 1975, 1_206_590, 10), ("w8", 10, 616, 7_850, 7)],
)
def test_the_workloads_have_the_sizes_of_other_simulators(
    name, cohort, samples, parameters, batches
):
    """Parameters, clients and samples agree.

    FLUTE's network has 1,199,882 parameters for ten digits.
    """
    assert sum(p.numel() for p in peers.CNN((1, 28, 28), 10).parameters()) == 1_199_882
    cfg = workloads.compose_workload(name)
    assert sum(p.numel() for p in build_net(cfg).parameters()) == parameters
    assert cfg.participation.per_round == cohort
    clients = cfg.participation.num_clients
    images = cfg.data.dataset.num_train
    assert cohort * images // clients == samples
    assert cfg.client.epochs == 1
    assert -(-images // clients // cfg.client.batch_size) == batches


def test_the_tests_for_a_gpu_need_no_package_that_the_device_lacks(tmp_path):
    """A machine without a GPU collects and skips all of them."""

    def collect():
        for name in [name for name in sys.modules if name.startswith(LACKING)]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(LACKING))  # their imports fail
        os.chdir(ROOT)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        raise SystemExit(pytest.main([*gpu.TESTS, "-n", "0", "-p", "no:cacheprovider"]))

    assert forked(collect, tmp_path / "printed.txt") == 0
    found = re.search(r"^(\d+) skipped in", (tmp_path / "printed.txt").read_text(), re.MULTILINE)
    assert int(found[1]) >= 30


def test_the_plain_loop_counts_positions_of_a_text_as_samples():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    y = torch.tensor([[1, 4, -100], [0, -100, -100]])
    logs = -logits.log_softmax(-1)
    expected = (logs[0, 0, 1] + logs[0, 1, 4] + logs[1, 0, 0]) / 3
    torch.testing.assert_close(plain.cross_entropy(logits, y), expected)
    torch.testing.assert_close(
        plain.cross_entropy(logits[:, 0], y[:, 0]), (logs[0, 0, 1] + logs[1, 0, 0]) / 2
    )


def test_the_memory_benchmark_counts_in_models():
    """A run holds at least the server's model, a client's, its gradients and its update.

    It needs a fresh process: memory that other tests have freed would hide it.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("RssAnon is in Linux's /proc")
    words = ("model=mlp", "model.hidden=[1500,1500]", "gc=none")
    code = f"from benchmarks import memory; print(*memory.models(*{words}))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before_rounds, run = map(float, printed.stdout.split()[-2:])
    assert 0 < before_rounds <= run
    assert 4 < run < 40
