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
        ("", "150000 100000", 2),  # one and a half processors
        ("zero", "1600000 100000", 8),
    ],
)
def test_cores_are_those_that_one_may_use(monkeypatch, variable, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self: quota)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cores() == expected
