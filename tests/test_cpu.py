"""How many cores a run takes, and the warning when it does not get them."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gcfed.callbacks import cores as watch
from gcfed.callbacks.cores import CoreWatch
from gcfed.utils.cpu import cores


@pytest.mark.parametrize(
    ("variable", "quota", "expected"),
    [
        ("3", "max 100000", 3),
        ("", "max 100000", 8),
        (None, "150000 100000", 2),  # one and a half processors
        (None, "50000 100000", 1),
        ("zero", "1600000 100000", 8),
    ],
)
def test_cores_are_those_that_one_may_use(monkeypatch, variable, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cores() == expected


def test_without_a_quota_to_read_the_cores_are_the_machines(monkeypatch):
    def missing(self):
        raise FileNotFoundError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores() == 8


@pytest.mark.parametrize(("per_second", "warnings"), [(40, 0), (900, 1)])
def test_a_run_says_once_that_it_loses_its_cores(monkeypatch, caplog, per_second, warnings):
    """Ten seconds of a clock and a counter of our own; the first window, with its start-up, does not count."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(watch, "_switches", lambda: int(per_second * now[0] + (5_000 if now[0] > 0 else 0)))
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(is_global_zero=True, world_size=2, strategy=strategy)
    callback = CoreWatch(per_second=200, window=2.0)
    callback.on_train_start(trainer)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            now[0] += 0.5
            callback.on_train_batch_end(trainer)
    assert len(caplog.records) == warnings
    if warnings:
        assert "2 × 1 threads lose their cores to others 900 times a second" in caplog.text
        assert "OMP_NUM_THREADS=1" in caplog.text
        assert now[0] == 10


def test_only_a_cpu_is_watched(monkeypatch):
    trainer = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(root_device=torch.device("cuda", 0)))
    callback = CoreWatch()
    callback.on_train_start(trainer)
    monkeypatch.setattr(watch, "_switches", lambda: pytest.fail("counted"))
    callback.on_train_batch_end(trainer)
