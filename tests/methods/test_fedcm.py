"""FedCM against a plain loop over autograd, and what its α and Δ mean."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import CPU, Sizes, make_net, random_federation, server_of, sgd, train_rounds, weights
from plain_reference import broken, flat, loss_at
from torch import nn

from gcfed.federated.messages import Download
from gcfed.methods.fedcm import FedCM


def reference(net, data, solver, rounds, *, alpha, weight_decay=0.0, cohort_of=3, seed=5):
    """FedCM in the paper's words. Δ is the mean of all local steps of the round, whichever client made them."""
    w, shapes = weights(net), [p.shape for p in net.parameters()]
    names, direction = [n for n, _ in net.named_parameters()], torch.zeros_like(w)
    for t in range(rounds):
        cohort = np.sort(np.random.default_rng(t).choice(len(data.clients), cohort_of, replace=False))
        plan = solver.plan(data, cohort, Download(t, seed, 0.0, {}, cohort), CPU)
        ends, steps = [], []
        for i in range(cohort_of):
            w_k = w.clone()
            for index, count in zip(plan.index[i], plan.counts[i], strict=True):
                if count == 0:
                    continue
                leaf = w_k.clone().requires_grad_()
                parts = leaf.split([s.numel() for s in shapes])
                params = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
                logits = torch.func.functional_call(net, params, data.x[index[:count]])
                F.cross_entropy(logits, data.y[index[:count]]).backward()
                steps.append(alpha * leaf.grad + (1 - alpha) * direction + weight_decay * w_k)
                w_k = w_k - solver.lr(t) * steps[-1]
            ends.append(w_k)
        w, direction = torch.stack(ends).mean(0), torch.stack(steps).mean(0)
    return w


@pytest.mark.parametrize("k", [1, 3])
def test_it_equals_a_plain_loop(federation, k):
    solver = sgd(0.3, weight_decay=0.01, lr_decay=0.8)
    expected = reference(make_net(), federation, solver, 5, alpha=0.25, weight_decay=0.01)
    found = train_rounds(make_net(), federation, solver, rounds=5, methods=[FedCM(0.25)], k=k)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_alpha_1_is_fedavg_bit_for_bit(federation):
    plain = train_rounds(make_net(), federation, sgd(), rounds=4, k=3)
    found = train_rounds(make_net(), federation, sgd(), rounds=4, methods=[FedCM(1.0)], k=3)
    assert torch.equal(found, plain)


def test_the_first_round_takes_steps_of_length_alpha(federation):
    found = train_rounds(make_net(), federation, sgd(0.4), rounds=1, methods=[FedCM(0.25)])
    plain = train_rounds(make_net(), federation, sgd(0.1), rounds=1)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


def test_weight_decay_acts_one_over_alpha_times_as_strongly(federation):
    """With one full-batch step a round, all clients: the limit is a minimum with the decay λ/α."""
    alpha, decay = 0.5, 0.2
    torch.manual_seed(0)
    net = nn.Linear(6, 4).double()
    solver = sgd(0.5, weight_decay=decay, steps=1, batch_size=50)
    train_rounds(net, federation, solver, rounds=100, methods=[FedCM(alpha)], cohort_of=5, k=5)
    losses = [F.cross_entropy(net(federation.x[i]), federation.y[i]) for i in federation.clients]
    (sum(losses) / 5 + decay / alpha / 2 * sum(p.square().sum() for p in net.parameters())).backward()
    assert max(p.grad.abs().max() for p in net.parameters()) < 1e-6


def test_a_frozen_parameter_has_no_direction(federation):
    net = make_net()
    net[0].weight.requires_grad_(False)
    before, sizes = net[0].weight.clone(), Sizes()
    train_rounds(net, federation, sgd(), rounds=2, methods=[FedCM(), sizes], k=3)
    assert torch.equal(net[0].weight, before)
    assert sizes.down[0] == 8 * 2 * (weights(net).numel() - before.numel())  # nor does it travel


def test_delta_is_the_mean_of_the_finite_clients_steps():
    """The long client is broken; the other takes one step of one batch, so Δ is its gradient."""
    data = broken(random_federation(sizes=(4, 40)), 1)
    method, net = FedCM(0.25), make_net()
    start = weights(net)
    (grad,) = torch.autograd.grad(loss_at(make_net(), start.requires_grad_(), data.x[:4], data.y[:4]), start)
    train_rounds(net, data, sgd(epochs=1), rounds=1, cohort_of=2, methods=[method])
    torch.testing.assert_close(flat(server_of(method).server_state("delta", {})), 0.25 * grad, rtol=0, atol=1e-12)
