"""A GPT with AdamW on its clients trains alike alone and in stacks, but for its keys' biases.

A key's bias adds the same number to all scores of a query, and softmax does not see it. So its
gradient is zero, and what a step computes is rounding, which differs between a stack and a single
client. Adam divides it by its own size, which makes steps of up to the learning rate of it.
"""

from functools import partial

import numpy as np
import pytest
import torch
from harness import ArrayData, train_rounds

from gcfed.federated.training.solver import LocalSolver
from gcfed.models.transformers import GPT

WIDTH = 16
RATE = 1e-3
STEPS = 2 * 2 * 4  # rounds, epochs, batches of the largest client


@pytest.fixture(scope="module")
def texts():
    """Three clients with random characters, and the next one as label of each."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(12, (40, 8), generator=g)
    y = torch.randint(12, (40, 8), generator=g)
    return ArrayData(x, y, np.split(np.arange(40), [10, 25]))


@pytest.fixture(scope="module")
def trained(texts):
    """``trained(dtype, k, eps)``: the network after two rounds with k clients in a stack."""

    def train(dtype, k, eps):
        torch.manual_seed(0)
        net = GPT(input_shape=(8,), num_classes=12, width=WIDTH, depth=2, heads=2).to(dtype)
        adam = partial(torch.optim.AdamW, lr=RATE, eps=eps)
        solver = LocalSolver(adam, epochs=2, batch_size=4)
        train_rounds(net, texts, solver, rounds=2, k=k)
        return net

    return train


def differences(one, other):
    """The largest differences of two networks: of the keys' biases, and of all other numbers."""
    of_keys = [0.0]
    of_others = [0.0]
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        apart = (a - b).detach().abs()
        if name.endswith("qkv.bias"):
            queries, keys, values = apart.split(WIDTH)
            of_keys.append(float(keys.max()))
            apart = torch.cat([queries, values])
        of_others.append(float(apart.max()))
    return max(of_keys), max(of_others)


def test_the_bias_of_a_key_has_no_gradient(trained, texts):
    net = trained(torch.float64, 1, 1e-8)
    torch.nn.functional.cross_entropy(net(texts.x).transpose(1, 2), texts.y).backward()
    for block in (net.block1, net.block2):
        queries, keys, values = block.attn.qkv.bias.grad.abs().split(WIDTH)
        assert keys.max() < 1e-12 * min(queries.max(), values.max())


def test_a_stack_changes_only_the_biases_of_keys(trained, texts):
    """In float32 with Adam's default of eps."""
    one, stacked = (trained(torch.float32, k, 1e-8) for k in (1, 3))
    of_keys, of_others = differences(one, stacked)
    assert of_others < 2e-6
    assert of_keys < STEPS * RATE
    torch.testing.assert_close(one(texts.x), stacked(texts.x), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "eps", "most"),
    [(torch.float32, 1e-4, 2e-6), (torch.float64, 1e-8, 1e-9), (torch.float64, 1e-4, 1e-13)],
    ids=["larger eps", "float64", "both"],
)
def test_a_stack_changes_nothing_if_rounding_is_far_below_eps(trained, dtype, eps, most):
    of_keys, of_others = differences(*(trained(dtype, k, eps) for k in (1, 3)))
    assert max(of_keys, of_others) < most
