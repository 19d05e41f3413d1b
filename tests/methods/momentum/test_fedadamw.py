"""FedAdamW equals a plain loop over clients."""

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, gradient, tensors

from gcfed.methods.centralization import LocalGC
from gcfed.methods.momentum.fedadamw import FedAdamW


@pytest.mark.parametrize("gc", [False, True])
def test_it_equals_the_plain_loop(federation, gc):
    """Unequal clients, one of them not finite. v starts as one number per tensor; t counts the
    steps of all rounds.
    """
    alpha = 0.3
    beta1 = 0.8
    beta2 = 0.95
    eps = 1e-3
    lr = 0.05
    decay = 0.1
    net = make_net()
    data = broken(federation, 3)
    w = weights(net)
    direction = 0.0
    mean = torch.zeros(len([*net.parameters()]))
    t0 = 0.0
    sizes = torch.tensor([p.numel() for p in net.parameters()])
    for t in range(3):
        ends = []
        moments = []
        steps = []
        counts = []
        for k in [k for k in cohort(data, t, 3) if k != 3]:
            u = w
            m = 0.0
            v = mean.double().repeat_interleave(sizes)
            for i, (x, y) in enumerate(batches(data, sgd(), k, t), start=1):
                g = tensors(net, gradient(net, u, x, y)).values()
                g = torch.cat(
                    [
                        (p - p.mean(1, keepdim=True) if gc and p.dim() > 1 else p).flatten()
                        for p in g
                    ]
                )
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g * g
                adam = m / (1 - beta1**i) / ((v / (1 - beta2 ** (t0 + i))) ** 0.5 + eps)
                steps.append(adam + alpha * direction + decay * u)
                u = u - lr * steps[-1]
            ends.append(u)
            moments.append(torch.stack([p.mean() for p in tensors(net, v).values()]))
            counts.append(i)
        w = sum(ends) / len(ends)
        mean = sum(moments) / len(ends)
        direction = sum(steps) / len(steps)
        t0 = t0 + sum(counts) / len(counts)
    method = FedAdamW(alpha, beta1=beta1, beta2=beta2, eps=eps)
    methods = [method, *([LocalGC()] if gc else [])]
    found = train_rounds(
        make_net(), data, sgd(lr, weight_decay=decay), rounds=3, methods=methods, k=2
    )
    assert_near(found, w, 1e-10)


def test_one_client_in_one_round_equals_torchs_adamw(federation):
    net = make_net()
    solver = sgd(0.05, weight_decay=0.1)
    ours = train_rounds(make_net(), federation, solver, rounds=1, methods=[FedAdamW()], cohort_of=1)
    adam = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    for x, y in batches(federation, solver, int(cohort(federation, 0, 1)[0]), 0):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        adam.step()
    assert_near(ours, weights(net), 1e-10)
