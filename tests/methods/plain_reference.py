"""Functions for plain loops: flat weights, autograd, one client at a time.

Only the draws come from the engine.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from harness import CPU, ArrayData, sgd, weights
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from gcfed.federated.protocol.messages import Download


def tensors(net, w):
    """Flat weights by name."""
    sizes = [p.numel() for p in net.parameters()]
    return {
        n: v.view(p.shape) for (n, p), v in zip(net.named_parameters(), w.split(sizes), strict=True)
    }


def loss_at(net, w, x, y):
    """Mean cross-entropy at flat weights ``w``."""
    return F.cross_entropy(functional_call(net, tensors(net, w), (x,)), y)


def gradient(net, w, x, y):
    """The gradient of ``loss_at``."""
    w = w.detach().requires_grad_()
    return torch.autograd.grad(loss_at(net, w, x, y), w)[0]


def cohort(data, t, size):
    """The clients that ``harness.train_rounds`` draws for round t."""
    return np.sort(np.random.default_rng(t).choice(len(data.clients), size, replace=False)).tolist()


def batches(data, solver, client, t, seed=5):
    """The mini-batches of a client in round t."""
    plan = solver.plan(
        data, np.array([client]), Download(t, seed, 0.0, {}, np.array([client])), CPU
    )
    for i, count in enumerate(plan.counts[0]):
        yield data.fetch(plan.index[0, i, :count], None)


def local_sgd(net, w0, steps, *, lr, momentum=0.0, nesterov=False, weight_decay=0.0, term=None):
    """SGD on the task's loss plus ``term(w)`` by autograd.

    Returns the weights and the number of steps.
    """
    w = w0.clone()
    velocity = torch.zeros_like(w0)
    count = 0
    for x, y in steps:
        w.requires_grad_()
        objective = loss_at(net, w, x, y) + (term(w) if term else 0.0)
        (grad,) = torch.autograd.grad(objective, w)
        grad = grad + weight_decay * w.detach()
        velocity = momentum * velocity + grad
        w = w.detach() - lr * (grad + momentum * velocity if nesterov else velocity)
        count = count + 1
    return w, count


def flat(params):
    """Named tensors in one vector."""
    return torch.cat([p.detach().flatten() for p in params.values()])


def centred(v, layers=(0, 1)):
    """Subtracts the mean over the inputs of each output, in some of the two layers of
    ``harness.make_net()``, from a flat gradient or update.
    """
    weight_0, bias_0, weight_1, bias_1 = v.split([30, 5, 20, 4])
    matrices = [weight_0.view(5, 6), weight_1.view(4, 5)]
    for layer in layers:
        matrices[layer] = matrices[layer] - matrices[layer].mean(1, keepdim=True)
    return torch.cat([matrices[0].flatten(), bias_0, matrices[1].flatten(), bias_1])


def skewed_federation(sizes=(6, 9, 4, 8)):
    """Each client has two of four classes and its own mean of inputs, so the local optima are far
    apart.
    """
    g = torch.Generator().manual_seed(3)
    x = []
    y = []
    for k, n in enumerate(sizes):
        labels = (torch.randint(2, (n,), generator=g) + k) % 4
        x.append(
            torch.randn(n, 6, generator=g, dtype=torch.float64)
            + torch.randn(6, generator=g, dtype=torch.float64)
        )
        y.append(labels)
    return ArrayData(
        torch.cat(x), torch.cat(y), np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    )


def softmax_regression():
    torch.manual_seed(0)
    return nn.Linear(6, 4).double()


def convolutional(shape, kernel):
    """A network for six numbers, read as an image of this shape, whose kernel leaves six, too."""
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, shape), nn.Conv2d(shape[0], 3, kernel), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6, 4)).double()


def optimum(net, data, weight_decay):
    """The minimum of the clients' mean objective with its L2 term, by Newton's method."""
    w = weights(net)

    def objective(w):
        losses = [loss_at(net, w, data.x[c], data.y[c]) for c in data.clients]
        return sum(losses) / len(losses) + 0.5 * weight_decay * w.square().sum()

    for _ in range(8):
        w = w - torch.linalg.solve(hessian(objective, w), jacobian(objective, w))
    assert jacobian(objective, w).abs().max() < 1e-12
    return w


def broken(data, client):
    """The same data, except that one input of this client is infinite."""
    data = copy.copy(data)
    data.x = data.x.clone()
    data.x[data.clients[client][0]] = torch.inf
    return data


def fedwmsam(net, data, alpha, lr, absent, rounds, move):
    """FedWMSAM as the paper writes it, with Δ_k = Δ + α/(1 − α) (c − c_k).

    Three clients train in a round; client ``absent`` does not count. ``move`` makes the move of
    w̃ from the distance to the point where the momentum alone would lead. Returns the model, α and
    the last mean of v_k.
    """
    w0 = weights(net)
    n = len(data.clients)
    c = torch.zeros_like(w0)
    delta = torch.zeros_like(w0)
    own = [torch.zeros_like(w0) for _ in range(n)]
    for t in range(rounds):
        ends = []
        changes = []
        steps = []
        values = []
        for k in [k for k in cohort(data, t, 3) if k != absent]:
            w = w0
            count = 0
            momentum = delta + alpha / (1 - alpha) * (c - own[k])
            for x, y in batches(data, sgd(), k, t):
                at = w + move(w0 + count * momentum - w)
                steps.append(alpha * gradient(net, at, x, y) + (1 - alpha) * momentum)
                w = w - lr * steps[-1]
                count = count + 1
            ends.append(w)
            changes.append((w0 - w) / (count * lr) - c)
            own[k] = own[k] + changes[-1]
            value = 0.0
            if delta.any():
                value = 1 + torch.cosine_similarity(w - w0, delta, dim=0).item()
            values.append(value)
        alpha = 0.99 * alpha + 0.01 * min(max(sum(values) / len(values), 0.1), 0.9)
        w0 = sum(ends) / len(ends)
        c = c + sum(changes) / n
        delta = sum(steps) / len(steps)
    return w0, alpha, sum(values) / len(values)
