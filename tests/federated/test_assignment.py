"""Which clients each process trains, and how many of them at once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import sgd
from torch import nn

from gcfed.federated.engine.layout import MAX_STREAMS, divide, division
from gcfed.federated.engine.simulation import Simulation, assign
from gcfed.federated.network.lent_network import Traits
from gcfed.models.cnn import CNN
from gcfed.models.mlp import MLP


def test_clients_are_assigned_to_processes_largest_first():
    cohort = np.array([3, 5, 8, 9])
    work = np.array([1, 10, 4, 6])
    parts = [assign(cohort, work, rank, 2) for rank in range(2)]
    assert [p.tolist() for p in parts] == [[9, 8], [5, 3]]
    assert assign(cohort, work, 0, 1).tolist() == [5, 9, 8, 3]
    assert len(assign(cohort, work, 0, 7)) == 0
    assert [len(assign(np.arange(9), np.ones(9), rank, 3)) for rank in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("cohort", "room", "alone", "chosen", "expected"),
    [
        (5, 100, False, None, (5, 1)),
        (5, 3, False, None, (3, 1)),
        (5, 0, False, None, (1, 1)),  # a client trains even if it does not seem to fit
        (5, 3, True, None, (1, 3)),
        (5, 100, True, None, (1, 5)),
        (50, 100, True, None, (1, MAX_STREAMS)),
        (5, 100, True, 2, (2, 2)),
        (5, 1, False, 2, (2, 1)),
    ],
)
def test_a_gpu_divides_a_cohort_by_its_room(cohort, room, alone, chosen, expected):
    assert divide(cohort, room, alone, chosen) == expected


def program_of(net, stack="auto"):
    """Five clients with 0, 1, 4, 9 and 16 samples."""
    shape = (3, 32, 32) if isinstance(net, CNN) else (1000,)
    data = SimpleNamespace(
        fetch=lambda index, augment: (torch.zeros(1, *shape), None),
        sizes=lambda: np.square(np.arange(5)),
    )
    module = SimpleNamespace(net=net, device=torch.device("cpu"), traits=Traits())
    return SimpleNamespace(solver=sgd(stack=stack), module=module, data=data)


@pytest.mark.parametrize(
    ("net", "gigabytes", "expected"),
    [
        # weights of 4.0 MB; a client needs 16 times as much, and twice 50 activations of 4 kB
        (MLP(input_shape=(1000,), num_classes=1000, hidden=[]), 80, (5, 1)),
        (MLP(input_shape=(1000,), num_classes=1000, hidden=[]), 0.2, (3, 1)),
        (CNN(input_shape=(3, 32, 32), num_classes=10), 0.5, (1, 3)),
        # its draws depend on the stack
        (nn.Sequential(nn.Linear(1000, 1000), nn.Dropout()), 80, (1, 1)),
    ],
)
def test_a_gpu_trains_as_many_clients_at_once_as_fit(net, gigabytes, expected):
    free_bytes = int(gigabytes * 1e9)
    assert division(program_of(net), 5, free_bytes) == expected
    assert division(program_of(net, stack=2), 5, free_bytes)[0] == 2


def test_a_cpu_trains_one_client_at_a_time_by_default():
    program = program_of(MLP(input_shape=(1000,), num_classes=1000, hidden=[]))
    layout = Simulation(program, None, 5).layout
    assert layout.k == 1
    assert layout.streams == []
