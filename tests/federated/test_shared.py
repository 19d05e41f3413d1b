"""Forked processes add up in shared memory."""

import os
import signal

import pytest
import torch
from test_launch import linux

from gcfed.federated.parallel import shared
from gcfed.federated.parallel.shared import SharedSums
from gcfed.federated.parallel.strategy import ForkLauncher
from gcfed.federated.parallel.sums import sum_over_processes


def numbers_of(rank, number):
    """What a process adds in its call with this number: other sizes in each, some above a slot."""
    g = torch.Generator().manual_seed(100 * number + rank)
    size = (3, 100, 1_001)[number % 3]
    return [
        torch.randn((), generator=g, dtype=torch.float64),
        torch.randint(-(2**62), 2**62, (size,), generator=g),
        torch.zeros(0, 3),
        torch.ones(5, dtype=torch.uint8),
        torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last),
    ]


@linux
@pytest.mark.parametrize("processes", [2, 3])
def test_forked_processes_get_the_same_sums(monkeypatch, tmp_path, processes):
    monkeypatch.setattr(shared, "SLOT", 1024)

    def work():
        rank = int(os.environ["LOCAL_RANK"])
        monkeypatch.setattr(
            "gcfed.federated.parallel.sums.rank_and_world", lambda: (rank, processes)
        )
        totals = [sum_over_processes(numbers_of(rank, number)) for number in range(30)]
        torch.save(totals, tmp_path / str(rank))

    ForkLauncher(processes).launch(work)
    found = [torch.load(tmp_path / str(rank)) for rank in range(processes)]
    for number in range(30):
        terms = zip(*(numbers_of(rank, number) for rank in range(processes)), strict=True)
        for column, own in enumerate(terms):
            total = found[0][number][column]
            expected = own[0].clone()
            for term in own[1:]:
                expected += term
            assert torch.equal(total, expected)
            assert total.stride() == own[0].stride()
            for other in found[1:]:
                assert torch.equal(other[number][column], total)


@linux
def test_a_process_does_not_wait_for_one_that_has_ended(monkeypatch):
    monkeypatch.setattr(shared, "PATIENCE_MS", 10)

    def work():
        if os.environ["LOCAL_RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        SharedSums.present.add([torch.ones(3)])

    with pytest.raises(ChildProcessError, match="process 2 of this run died of signal 9"):
        ForkLauncher(3).launch(work)
    assert SharedSums.present is None
