"""FedDC against a plain loop over autograd of its objective, and its fixed point: the global optimum."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import CPU, Sizes, make_net, random_federation, server_of, sgd, train_rounds, weights
from torch import nn
from torch.func import functional_call

from gcfed.federated.messages import Download
from gcfed.federated.store import ClientStores
from gcfed.methods.feddc import FedDC

CORRECTIONS = ("update", "control")


def reference(net, data, solver, rounds, *, alpha, correction, cohort_of=3, seed=5):
    """FedDC in the paper's words, with −g_k/(ηK) written as the gradient c_k and all means taken over all clients."""
    w, shapes, n = weights(net), [p.shape for p in net.parameters()], len(data.clients)
    names, (h, c) = [name for name, _ in net.named_parameters()], torch.zeros(2, n, len(w), dtype=w.dtype)
    for t in range(rounds):
        cohort = np.sort(np.random.default_rng(t).choice(n, cohort_of, replace=False))
        plan = solver.plan(data, cohort, Download(t, seed, 0.0, {}, cohort), CPU)
        mean_c, ends = c.mean(0), []
        for i, k in enumerate(cohort):
            theta, tau = w.clone(), 0
            for index, count in zip(plan.index[i], plan.counts[i], strict=True):
                if count == 0:
                    continue
                leaf = theta.clone().requires_grad_()
                parts = leaf.split([s.numel() for s in shapes])
                params = {name: p.view(s) for name, p, s in zip(names, parts, shapes, strict=True)}
                logits = functional_call(net, params, data.x[index[:count]])
                loss = F.cross_entropy(logits, data.y[index[:count]])
                loss = loss + alpha / 2 * (h[k] + leaf - w).square().sum() + leaf @ (mean_c - c[k])
                theta, tau = theta - solver.lr(t) * torch.autograd.grad(loss, leaf)[0], tau + 1
            h[k] += theta - w
            kept = c[k] - mean_c if correction == "control" else 0.0
            c[k] = kept - (theta - w) / (solver.lr(t) * tau)
            ends.append(theta)
        w = torch.stack(ends).mean(0) + h.mean(0)
    return w


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("k", [1, 3])
def test_it_equals_a_plain_loop(federation, k, correction):
    solver = sgd(0.2, lr_decay=0.8)
    expected = reference(make_net(), federation, solver, 6, alpha=0.3, correction=correction)
    method = FedDC(0.3, correction=correction)
    found = train_rounds(make_net(), federation, solver, rounds=6, methods=[method], k=k)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def heterogeneous():
    """Four clients with inputs and labels of their own kind."""
    data = random_federation(sizes=(7, 12, 5, 9))
    for k, rows in enumerate(data.clients):
        data.x[rows] += torch.randn(6, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        data.y[rows] = k if k % 2 else (data.y[rows] + k) % 4
    return data


def optimum(data, decay):
    """The minimum of the mean of the clients' regularised logistic losses, by Newton's method."""

    def objective(w):
        losses = [F.cross_entropy(data.x[i] @ w.view(4, 6).T, data.y[i]) for i in data.clients]
        return sum(losses) / len(losses) + decay / 2 * w.square().sum()

    w = torch.zeros(24, dtype=torch.float64)
    for _ in range(12):
        grad = torch.autograd.functional.jacobian(objective, w)
        w = w - torch.linalg.solve(torch.autograd.functional.hessian(objective, w), grad)
    return w


def test_it_reaches_the_global_optimum_where_fedavg_is_biased():
    data, decay = heterogeneous(), 0.5
    best, solver = optimum(data, decay), sgd(0.2, weight_decay=decay, steps=5, batch_size=12)

    def distance(*methods, rounds=60):
        net = nn.Linear(6, 4, bias=False).double()
        found = train_rounds(net, data, solver, rounds=rounds, methods=methods, cohort_of=2, k=2)
        return (found - best).norm()

    assert distance(rounds=30) > 0.1
    for correction in CORRECTIONS:
        assert distance(FedDC(2.0, correction=correction)) < 1e-4


def states(method, stores, net):
    like = {name: p.detach() for name, p in net.named_parameters()}
    read = {kind: stores.open(f"feddc_{kind}").read(np.arange(5), like) for kind in ("drift", "control")}
    server = server_of(method)
    return read["drift"], read["control"], server.server_state("h", like), server.server_state("c", like)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_server_holds_the_means_over_all_clients(federation, correction):
    net, stores, method = make_net(), ClientStores(), FedDC(0.3, correction=correction)
    train_rounds(net, federation, sgd(), rounds=6, methods=[method], stores=stores, k=2)
    drifts, controls, mean_drift, mean_control = states(method, stores, net)
    for name, p in net.named_parameters():
        torch.testing.assert_close(mean_drift[name], drifts[name].mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(mean_control[name], controls[name].mean(0), rtol=0, atol=1e-12)
        assert drifts[name].abs().amax() > 0.01 * p.abs().max()


def test_in_the_first_round_it_is_fedavg_with_the_mean_drift_added(federation):
    """One local step: nothing pulls yet, and the drifts of 3 of 5 clients make the server's step 8/5 as long."""
    solver, start = sgd(steps=1), weights(make_net())
    plain = train_rounds(make_net(), federation, solver, rounds=1)
    found = train_rounds(make_net(), federation, solver, rounds=1, methods=[FedDC()])
    torch.testing.assert_close(found - start, 1.6 * (plain - start), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_moves_twice_the_bytes_both_ways_in_the_type_of_the_model(dtype):
    """The lengths of the clients' steps come from the host, in float64."""
    net, sizes = make_net(dtype=dtype), Sizes()
    train_rounds(net, random_federation(dtype=dtype), sgd(), rounds=1, methods=[FedDC(), sizes], k=2)
    model = sum(p.nbytes for p in net.parameters())
    assert sizes.down == [2 * model]
    assert set(sizes.up) == {2 * model}
