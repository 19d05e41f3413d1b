"""SSF's matrix regression: its optimum, its seed, and its linear network, which starts at zero."""

import numpy as np
import pytest
import torch

from gcfed.data.sets.datasets import matrix_regression
from gcfed.models.mlp import Linear

SMALL = {"num_clients": 4, "features": 5, "outputs": 3, "samples": 8, "test_samples": 2}


def by_client(split):
    return [(split.x[split.groups == k], split.y[split.groups == k]) for k in range(4)]


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_the_clients_gradients_cancel_at_the_optimum(ridge):
    """The mean of the clients' gradients is zero at the optimum.

    Each client's own gradient is not.
    """
    dataset = matrix_regression(**SMALL, ridge=ridge)
    net = Linear(input_shape=[5], num_classes=3).double()
    assert not net.fc.weight.any()
    net.load_state_dict({name: torch.from_numpy(v.copy()) for name, v in dataset.optimum.items()})
    grads = []
    for x, y in by_client(dataset.train):
        x = torch.from_numpy(x).double()
        y = torch.from_numpy(y).double()
        objective = (net(x) - y).square().sum() / (
            2 * len(x)
        ) + ridge / 2 * net.fc.weight.square().sum()
        grads += torch.autograd.grad(objective, net.fc.weight)
    assert torch.stack(grads).mean(0).abs().max() < 1e-12
    assert min(grad.abs().max() for grad in grads) > 1e-3


def test_the_seed_decides_the_data():
    a, b, c = (matrix_regression(**SMALL, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(a.train.x, b.train.x)
    assert np.array_equal(a.optimum["fc.weight"], b.optimum["fc.weight"])
    assert not np.array_equal(a.train.x, c.train.x)
    assert not np.array_equal(a.train.x[:2], a.test.x[:2])
