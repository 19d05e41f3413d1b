"""FedAvg as a loop on plain tensors, one client at a time: the reference for methods that change
the local loss.

The loop uses only the engine's order of batches. Each test writes the loss as its paper does, and
autograd derives it.
"""

import numpy as np
import torch
from harness import ArrayData, assert_near, sgd, train_rounds
from plain_reference import batches, cohort
from torch import nn

LR = 0.3
SOLVER = sgd(lr=LR)  # two epochs in batches of four


class Net(nn.Module):
    """Three linear layers with ReLUs between, applied at every position of ``[B, D]`` or ``[B, T,
    D]``.
    """

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.fc1 = nn.Linear(6, 7)
        self.fc2 = nn.Linear(7, 5)
        self.fc3 = nn.Linear(5, 4)
        self.double()

    def features(self, x):
        return self.fc2(self.fc1(x).relu()).relu()

    def head(self, h):
        return self.fc3(h)

    def stages(self):
        return {
            "fc1": lambda x: self.fc1(x).relu(),
            "fc2": lambda h: self.fc2(h).relu(),
            "fc3": self.fc3,
        }

    def forward(self, x):
        return self.head(self.features(x))


def layers(w, x, first=0):
    """The outputs of all layers from ``first`` on, with weights and biases in the list ``w``."""
    out = []
    for i in range(first, 3):
        x = x @ w[2 * i].T + w[2 * i + 1]
        x = x.clamp(min=0) if i < 2 else x
        out.append(x)
    return out


def plain_rounds(data, objective, rounds, cohort_of=3):
    """The final weights.

    ``objective(w, start, client, x, y, previous)`` is one client's loss on one batch.
    """
    w0 = [p.detach().clone() for p in Net().parameters()]
    previous = {}
    for t in range(rounds):
        last = {}
        for k in cohort(data, t, cohort_of):
            w = [p.clone() for p in w0]
            for x, y in batches(data, SOLVER, k, t):
                leaves = [p.requires_grad_() for p in w]
                loss = objective(leaves, w0, k, x, y, previous.get(k))
                grads = torch.autograd.grad(loss, leaves)
                w = [(p - LR * g).detach() for p, g in zip(leaves, grads, strict=True)]
            last[k] = w
        previous |= last
        w0 = [sum(ws) / cohort_of for ws in zip(*last.values(), strict=True)]
    return torch.cat([p.flatten() for p in w0])


def check(method, data, objective, rounds=2):
    """The method equals the plain loop in a stack of two clients and a stack of one."""
    found = train_rounds(Net(), data, SOLVER, rounds=rounds, methods=[method], k=2)
    assert found.isfinite().all()
    assert_near(found, plain_rounds(data, objective, rounds), 1e-10)


def federation(sequences=False, sizes=(7, 12, 5, 9, 1), seed=3) -> ArrayData:
    """Clients of unequal sizes with few of four classes.

    Sequences have three labels, and some are padding.
    """
    g = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    clients = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    shape = (n, 3) if sequences else (n,)
    y = torch.randint(2, shape, generator=g)
    for k, idx in enumerate(clients):
        y[idx] = (y[idx] + k) % 4
    if sequences:
        y[torch.rand(n, generator=g) < 0.4, 2] = -100
    data = ArrayData(torch.randn(*shape, 6, generator=g, dtype=torch.float64), y, clients)
    data.class_counts = lambda ids: np.stack(  # type: ignore[attr-defined]
        [
            np.bincount(y[clients[k]].flatten()[y[clients[k]].flatten() >= 0], minlength=4)
            for k in ids
        ]
    )
    return data
