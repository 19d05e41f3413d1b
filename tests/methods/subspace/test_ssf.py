"""SSF equals the paper's iteration in full coordinates."""

import pytest
import torch
import torch.nn.functional as F
from harness import Sizes, Spy, assert_near, client_of, server_of, sgd, train_rounds
from plain_reference import batches, cohort, flat
from torch import nn
from torch.func import functional_call

from gcfed.federated.parts import Order
from gcfed.federated.protocol.messages import nbytes
from gcfed.methods.subspace.random import random_basis
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.quantization import Quantization


def wide_and_tall():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


class Coordinates:
    """The projections of one round by the paper's formulas, W P or PᵀW."""

    def __init__(self, w, t, ratio, refresh, seed=5):
        self.p = {
            n: random_basis(
                seed, t // refresh, n, max(v.shape), max(1, round(max(v.shape) * ratio)), v
            )
            for n, v in w.items()
            if v.dim() == 2
        }

    def down(self, tensors):
        return {n: self._down(n, v) for n, v in tensors.items()}

    def _down(self, n, v):
        if n not in self.p:
            return v
        return v @ self.p[n] if v.shape[1] >= v.shape[0] else self.p[n].T @ v

    def up(self, z, like):
        return {n: self._up(n, v, like[n]) for n, v in z.items()}

    def _up(self, n, v, like):
        if n not in self.p:
            return v
        return v @ self.p[n].T if like.shape[1] >= like.shape[0] else self.p[n] @ v


def combine(f, *dicts):
    return {n: f(*(d[n] for d in dicts)) for n in dicts[0]}


def local_iteration(net, space, w, data_batches, correction, lr, weight_decay):
    """z_τ, and the mean of ∂F_k/∂z over the steps by autograd through Pz + (I − Π)w."""
    z = space.down(w)
    grads = []
    rest = combine(torch.sub, w, space.up(z, w))
    for x, y in data_batches:
        z = {n: v.detach().requires_grad_() for n, v in z.items()}
        full = combine(torch.add, space.up(z, w), rest)
        objective = F.cross_entropy(functional_call(net, full, (x,)), y)
        objective = objective + weight_decay / 2 * sum(v.square().sum() for v in full.values())
        grad = dict(zip(z, torch.autograd.grad(objective, list(z.values())), strict=True))
        grads.append(grad)
        z = {n: v.detach() - lr * (grad[n] + correction[n]) for n, v in z.items()}
    return z, {n: sum(g[n] for g in grads) / len(grads) for n in z}


def reference(net, data, solver, *, rounds, ratio, refresh=1, weight_decay=0.0, gamma=1.0, size=3):
    w = {n: p.detach().clone() for n, p in net.named_parameters()}
    count = len(data.clients)
    c = {n: torch.zeros_like(v) for n, v in w.items()}
    own = {k: dict(c) for k in range(count)}
    for t in range(rounds):
        space = Coordinates(w, t, ratio, refresh)
        lr = solver.lr(t)
        z0 = space.down(w)
        moves = []
        changes = []
        for k in cohort(data, t, size):
            correction = combine(torch.sub, space.down(c), space.down(own[k]))
            z, mean = local_iteration(
                net, space, w, batches(data, solver, k, t), correction, lr, weight_decay
            )
            moves.append(combine(torch.sub, z, z0))
            rest = combine(torch.sub, own[k], space.up(space.down(own[k]), w))
            new = combine(torch.add, rest, space.up(mean, w))
            changes.append(combine(torch.sub, new, own[k]))
            own[k] = new
        rest = combine(torch.sub, w, space.up(z0, w))
        z = {n: v + gamma * sum(m[n] for m in moves) / len(moves) for n, v in z0.items()}
        w = combine(torch.add, space.up(z, w), rest)
        c = {n: v + sum(change[n] for change in changes) / count for n, v in c.items()}
    return flat(w), flat(c)


def server(gamma):
    return lambda params: torch.optim.SGD(params, lr=gamma)


@pytest.mark.parametrize(
    ("ratio", "refresh", "weight_decay", "gamma"),
    [(0.3, 1, 0.0, 1.0), (0.5, 3, 0.05, 0.7), (0.01, 2, 0.05, 1.0)],
)
def test_ssf_equals_the_papers_iteration(federation, ratio, refresh, weight_decay, gamma):
    solver = sgd(weight_decay=weight_decay, lr_decay=0.8)
    method = SSF(ratio=ratio, refresh=refresh)
    ours = train_rounds(
        wide_and_tall(), federation, solver, methods=[method], rounds=4, k=2, server=server(gamma)
    )
    theirs, c = reference(
        wide_and_tall(),
        federation,
        solver,
        rounds=4,
        ratio=ratio,
        refresh=refresh,
        weight_decay=weight_decay,
        gamma=gamma,
    )
    assert_near(ours, theirs, 1e-10)
    assert_near(flat(server_of(method).control), c, 1e-10)


def sent(method, *others, data, k=2):
    """Bytes that clients of each stack send, and bytes that a client receives."""
    sizes = Sizes()
    train_rounds(wide_and_tall(), data, sgd(), rounds=1, methods=[method, *others, sizes], k=k)
    return sizes.up, sizes.down[0]


# Weights [8, 6] and [4, 8] with d = 8 and r = 2, biases of 8 and 4. A number has 8 bytes.
COORDINATES = 8 * (2 * 6 + 4 * 2 + 8 + 4)


def test_ssf_sends_the_bytes_of_the_coordinates_also_quantized(federation):
    assert sent(SSF(ratio=0.25), data=federation) == ([2 * COORDINATES] * 2, 2 * COORDINATES)
    uploads, _ = sent(SSF(ratio=0.25), Quantization(bits=8), data=federation)
    assert uploads == [COORDINATES + COORDINATES // 8 + 4 * 4] * 2


def test_ssf_holds_only_projections_on_the_device():
    """During training, a stack holds only projections. The variates stay on the CPU."""
    method = SSF(ratio=0.25)
    sizes = []

    class Watch(Spy):
        order = Order.PROJECTS

        def prepare(self, stack, own, download):
            sizes.append(nbytes(stack.prepared[client_of(method)]))

    train_rounds(wide_and_tall(), rounds=2, methods=[method, Watch()], k=3)
    assert sizes == [3 * COORDINATES] * 2
    assert {t.device.type for t in server_of(method).control.values()} == {"cpu"}
