"""The benchmarks run and print what they promise. No test asserts a speed."""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import forked

from benchmarks import gpu, kernels, peers, plain, run, workloads
from gcfed.models.own import build_net
from gcfed.utils.resolvers import ROOT

LACKING = ("nbformat", "nbconvert", "hatchling", "wandb", "mlflow", "optuna")
PARTS = {"forward", "backward", "step", "hooks", "batch", "broadcast", "aggregate", "evaluate", "checkpoint", "loop"}


@pytest.fixture
def bench(monkeypatch, capsys):
    """``bench(words)`` is what ``python benchmarks/run.py <words>`` prints; the sitting is a process of its own."""

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
    monkeypatch.setattr(plain, "SHAPES", [(256, 256, 256)])  # of the matrix products that it times
    said = bench("digits", "--pairs", "1", "--layout", "2x1", "--out", str(tmp_path), "data.limit_train=100")
    assert "| GC-Fed |" in said
    assert (tmp_path / "table.md").read_text() in said
    (figures,) = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["processes"], figures["threads"], figures["precision"]) == (2, 1, "32-true")
    fedavg, gcfed = figures["rounds"]
    assert (fedavg["method"], gcfed["method"]) == ("fedavg", "gcfed")
    assert fedavg["samples"] == gcfed["samples"] > 0  # one cohort
    for rows in (fedavg, gcfed):
        assert rows["plain_s"] > 0
        assert rows["time/round_s"] > rows["time/train_s"] > 0
    parts = figures["gcfed"]["parts_s"]
    assert parts.keys() >= PARTS
    assert min(parts[name] for name in PARTS) > 0  # a part that is wrapped in vain takes no time
    assert 0 < figures["gcfed"]["of_gemm"] < 1
    # 64·512 + 512·256 + 256·10 weights, two operations each, three products a weight but for the first layer's inputs
    assert figures["mflop_per_sample"] == pytest.approx(2e-6 * (2 * 64 * 512 + 3 * (512 * 256 + 256 * 10)))
    assert figures["first_round_done_s"] > figures["before_first_round_s"] > 0


@pytest.mark.parametrize(("algorithm", "stack"), [("fedavg", 1), ("scaffold", 5)])
def test_a_step_has_as_many_kernels_as_the_table_says(algorithm, stack):
    rows = re.findall(r"^\| (.*) \| (\d+) \| (\d+) \|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
    ((alone, five),) = [numbers for names, *numbers in rows if f"`{algorithm}`" in names]
    assert kernels.count(algorithm, stack) == pytest.approx(int(alone if stack == 1 else five), rel=0.1)


def test_a_run_is_measured_by_its_steps(tmp_path):
    """What can be tried of benchmarks/gpu.py without one."""
    small = ("data.limit_train=200", "data.limit_test=20", "participation.num_clients=5", "client.steps=1", "rounds=2")
    gpu.run(tmp_path, "digits", *small, trainer="cpu")
    found = gpu.seconds(tmp_path)
    assert found["round_s"] >= found["train_s"] > 0
    assert found["step_us"] == pytest.approx(found["train_s"] / 5 * 1e6)


@pytest.mark.parametrize(
    ("name", "cohort", "samples", "parameters"), [("w6", 50, 2500, 1_626_442), ("w7", 10, 1975, 1_206_590)]
)
def test_the_workloads_of_other_simulators_are_theirs(name, cohort, samples, parameters):
    """The network by its parameters (FLUTE says 1,199,882 for ten digits), a round by its clients and samples."""
    assert sum(p.numel() for p in peers.CNN((1, 28, 28), 10).parameters()) == 1_199_882
    cfg = workloads.compose_workload(name)
    assert sum(p.numel() for p in build_net(cfg).parameters()) == parameters
    assert cfg.participation.per_round == cohort
    clients, images = cfg.participation.num_clients, cfg.data.dataset.num_train
    assert cohort * images // clients == samples
    batches = -(-images // clients // cfg.client.batch_size)
    assert (cfg.client.epochs, batches) == (1, 5 if name == "w6" else 10)


def test_the_tests_for_a_gpu_need_no_package_that_a_borrowed_machine_lacks(tmp_path):
    """On a machine without a GPU all of them are collected and skipped."""

    def collect():
        for name in [name for name in sys.modules if name.startswith(LACKING)]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(LACKING))  # an import of these fails
        os.chdir(ROOT)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        raise SystemExit(pytest.main([*gpu.TESTS, "-p", "no:cacheprovider"]))

    assert forked(collect, tmp_path / "printed.txt") == 0
    found = re.search(r"^(\d+) skipped in", (tmp_path / "printed.txt").read_text(), re.MULTILINE)
    assert int(found[1]) >= 30
