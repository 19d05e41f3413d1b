"""What a library must leave alone: the process that imports it and calls it."""

import subprocess
import sys

import pytest

from gcfed.utils.resolvers import ROOT

CODE = """
import importlib, logging, os, pkgutil, random, signal, sys, threading, warnings
from contextlib import suppress

# What others change when they are imported is theirs.
import hydra, jinja2, lightning.pytorch, matplotlib.pyplot, numpy, pandas, torch
import tensorboard.plugins.hparams.summary_v2, torch.utils.tensorboard
from lightning.pytorch.loggers import TensorBoardLogger
with suppress(ImportError):
    import optuna

LOGGERS = [logging.getLogger(name) for name in ("", "lightning.pytorch", "lightning.pytorch.profilers", "torch",
                                                "lightning.fabric.utilities.distributed", "matplotlib", "hydra")]

def state():
    params = {k: str(v) for k, v in dict.items(matplotlib.rcParams)}  # to ask for the backend would choose one
    return {
        "matplotlib": params, "raise": logging.raiseExceptions, "disable": logging.root.manager.disable,
        "loggers": [(l.name, l.level, l.handlers[:], l.filters[:], l.propagate) for l in LOGGERS],
        "warnings": warnings.filters[:], "showwarning": warnings.showwarning, "excepthook": sys.excepthook,
        "signals": [signal.getsignal(s) for s in sorted(signal.valid_signals())], "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(), "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "grad": torch.is_grad_enabled(),
        "cudnn": torch.backends.cudnn.benchmark, "random": random.getstate(), "numpy": str(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(), "environment": {**os.environ}, "path": sys.path[:], "cwd": os.getcwd(),
        "argv": sys.argv[:], "stdout": sys.stdout, "numpy errors": numpy.geterr(), "alive": threading.active_count(),
    }

def unchanged(name, call):
    before, result = state(), call()
    after = state()
    odd = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert not odd, f"{name} changes {str(odd)[:2000]}"
    return result

def everything():
    for module in pkgutil.walk_packages(gcfed.__path__, "gcfed."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert str(error.name).startswith("nvflare"), error

def refused():
    with suppress(ValueError):
        gcfed.train(gcfed.configure(small, "gc.boundary=nowhere", folder=f"{folder}/refused"))
        raise SystemExit("it was not refused")

folder, small = sys.argv[1], ["rounds=1", "data.limit_train=100", "model.hidden=[8]", f"paths.log_dir={sys.argv[1]}"]
torch.set_num_threads(3)  # more than a run would take
gcfed = unchanged("import gcfed", lambda: importlib.import_module("gcfed"))
for name in gcfed.__all__:
    unchanged(f"gcfed.{name}", lambda: getattr(gcfed, name))
unchanged("to import everything", everything)
cfg = unchanged("configure", lambda: gcfed.configure(small))
unchanged("train", lambda: gcfed.train(cfg))
two = gcfed.configure(small, "gc=none", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
two.precision, two.precision_matmul = "64-true", "high"
unchanged("two processes", lambda: gcfed.train(two))
unchanged("a run that is refused", refused)
unchanged("compare", lambda: gcfed.compare({"a": cfg}, seeds=[1]).figure())
unchanged("report", lambda: gcfed.report(folder, out=f"{folder}/report"))
"""


@pytest.mark.slow
def test_nothing_that_python_calls_changes_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], cwd=ROOT / "src", capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "report" / "index.html").is_file()
