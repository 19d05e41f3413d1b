"""A library must not change the process that calls it."""

import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch

import gcfed

LOGGERS = [
    logging.getLogger(name)
    for name in (
        "",
        "lightning.pytorch",
        "torch",
        "lightning.fabric.utilities.distributed",
        "matplotlib",
        "hydra",
    )
]


def state():
    # reading mpl.rcParams["backend"] would choose a backend
    params = {k: str(v) for k, v in dict.items(mpl.rcParams)}
    return {
        "matplotlib": params,
        "raise": logging.raiseExceptions,
        "disable": logging.root.manager.disable,
        "loggers": [(o.name, o.level, o.handlers[:], o.filters[:], o.propagate) for o in LOGGERS],
        "warnings": warnings.filters[:],
        "showwarning": warnings.showwarning,
        "excepthook": sys.excepthook,
        "signals": [signal.getsignal(s) for s in sorted(signal.valid_signals())],
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "cudnn": torch.backends.cudnn.benchmark,
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "torch": torch.get_rng_state().tolist(),
        "environment": {**os.environ},
        "path": sys.path[:],
        "cwd": Path.cwd(),
        "start": multiprocessing.get_start_method(allow_none=True),
        "argv": sys.argv[:],
        "stdout": sys.stdout,
        "numpy errors": np.geterr(),
    }


def unchanged(call, *args, **kwargs):
    before = state()
    result = call(*args, **kwargs)
    assert state() == before
    return result


def test_calls_from_python_do_not_change_the_process(tmp_path, request):
    small = ["rounds=1", "data.limit_train=40", "model.hidden=[8]", f"paths.log_dir={tmp_path}"]
    two = [
        "gc=none",
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "extras.figures=false",
    ]
    torch.set_num_threads(3)  # a run would use fewer
    multiprocessing.set_start_method(None, force=True)  # as in a new process
    cfg = unchanged(gcfed.configure, small)
    two = gcfed.configure(small, two)
    two.precision = "64-true"
    two.precision_matmul = "high"
    cfg.rounds = 2
    cfg.eval_precision = "bf16-mixed"
    usual = unchanged(gcfed.train, cfg, quiet=True)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        odd = unchanged(gcfed.train, cfg, quiet=True)
    assert odd.frame.filter(like="loss").equals(usual.frame.filter(like="loss"))
    unchanged(gcfed.train, two)
    before = state()
    with pytest.raises(ValueError, match="nowhere"):
        gcfed.train(gcfed.configure(small, "gc.boundary=nowhere", folder=tmp_path / "refused"))
    assert state() == before
    unchanged(gcfed.report, tmp_path, out=tmp_path / "report")
    assert (tmp_path / "report" / "index.html").is_file()
