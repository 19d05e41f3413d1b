"""How many cores a run takes."""

import os
from pathlib import Path

import pytest

from gcfed.utils.machine import cores


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
