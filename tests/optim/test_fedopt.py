"""Server optimizers equal Algorithm 2 of their paper in NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from gcfed.optim.fedopt import FedAdagrad, FedAdam, FedYogi

ALL = [FedAdagrad, FedAdam, FedYogi]


def second_moment(cls: type, v: np.ndarray, d: np.ndarray, beta2: float) -> np.ndarray:
    if cls is FedAdagrad:
        return v + d**2
    if cls is FedAdam:
        return beta2 * v + (1 - beta2) * d**2
    return v - (1 - beta2) * d**2 * np.sign(v - d**2)


def betas(cls: type) -> dict:
    return {"beta1": 0.8} if cls is FedAdagrad else {"betas": (0.8, 0.95)}


def deltas(steps: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        [rng.normal(scale=0.05, size=(3, 4)), rng.normal(scale=0.05, size=3)] for _ in range(steps)
    ]


def make_params() -> list[nn.Parameter]:
    rng = np.random.default_rng(1)
    return [nn.Parameter(torch.tensor(rng.normal(size=shape))) for shape in ((3, 4), (3,))]


def feed(optimizer, params, updates):
    for update in updates:
        for p, d in zip(params, update, strict=True):
            p.grad = torch.tensor(-d)
        optimizer.step()


@pytest.mark.parametrize("cls", ALL)
def test_several_steps_equal_algorithm_2(cls):
    lr = 0.1
    tau = 0.02
    beta1 = 0.8
    beta2 = 0.95
    params = make_params()
    expected = [p.detach().numpy().copy() for p in params]
    m = [np.zeros_like(w) for w in expected]
    v = [np.full_like(w, tau**2) for w in expected]
    updates = deltas(7)
    feed(cls(params, lr=lr, tau=tau, **betas(cls)), params, updates)
    for update in updates:
        for i, d in enumerate(update):
            m[i] = beta1 * m[i] + (1 - beta1) * d
            v[i] = second_moment(cls, v[i], d, beta2)
            expected[i] += lr * m[i] / (np.sqrt(v[i]) + tau)
    for p, w in zip(params, expected, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-12)


@pytest.mark.parametrize(
    ("cls", "m", "v"),
    [
        (FedAdagrad, 3e-3, 1e-6 + 9e-6),  # β₁ = 0
        (FedAdam, 3e-4, 0.99 * 1e-6 + 0.01 * 9e-6),
        (FedYogi, 3e-4, 1e-6 + 0.01 * 9e-6),  # v < Δ², so v grows
    ],
)
def test_first_step_with_the_defaults_by_hand(cls, m, v):
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    w.grad = torch.tensor([-3e-3], dtype=torch.float64)  # Δ = 3e-3
    cls([w]).step()
    assert w.item() == pytest.approx(1 + 0.01 * m / (math.sqrt(v) + 1e-3), rel=1e-14)
