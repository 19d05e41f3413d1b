"""FedReg against a plain loop of its algorithm, what its regularization promises, and the switches that undo it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import make_net, make_setup, random_federation, sgd, train_rounds, weights
from plain_reference import batches, cohort, loss_at
from torch import nn
from torch.func import functional_call

from gcfed.federated.batches import plan_batches
from gcfed.federated.messages import Download
from gcfed.federated.refusals import validate_parts
from gcfed.federated.stack import ClientStack, broadcast_state
from gcfed.methods.fedreg import FedReg, PseudoPass, climb
from gcfed.methods.sam import Sam
from gcfed.utils.rng import torch_seed

ETA_S, ETA_P, STEPS = 0.2, 0.05, 3


def outputs(net, w, x):
    params, offset = {}, 0
    for name, p in net.named_parameters():
        params[name] = w[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    return functional_call(net, params, (x,))


def climbed(net, w0, x, y, eta):
    for _ in range(STEPS):
        x = x.clone().requires_grad_()
        x = (x + eta * torch.autograd.grad(loss_at(net, w0, x, y), x)[0].sign()).detach()
    return x


def gradient(loss, w):
    w = w.clone().requires_grad_()
    return torch.autograd.grad(loss(w), w)[0]


def part(vector, direction):
    """The part of a vector along a direction, as a multiple of it."""
    return (vector @ direction) / (direction @ direction)


def own_pass(data, client, t, seed=5):
    plan = plan_batches(
        data, np.array([client]), seed=torch_seed(seed, "pseudo"), round_index=t, batch_size=4, epochs=1, steps=None,
        last_batch="keep", to_device=torch.from_numpy,
    )  # fmt: skip
    return [data.fetch(plan.index[0, i, :count], None) for i, count in enumerate(plan.counts[0])]


def reference(net, data, solver, *, rounds, gamma, beta, pseudo, perturbed, private, lr=0.1, decay=0.0):
    w0 = weights(net)
    for t in range(rounds):
        models = []
        for k in cohort(data, t, 3):
            made = []
            for x, y in own_pass(data, k, t):
                x_s = climbed(net, w0, x, y, ETA_S)
                made.append((x_s, outputs(net, w0, x_s).softmax(-1).detach(), climbed(net, w0, x, y, ETA_P), y))
            w = w0
            for step, (x, y) in enumerate(batches(data, solver, k, t)):
                slow = gamma * w + (1 - gamma) * w0
                g = gradient(lambda v, x=x, y=y: loss_at(net, v, x, y), slow)
                if private:
                    x_m = climbed(net, w0, x, y, ETA_S)
                    uniform = torch.full((len(x), 4), 0.25, dtype=torch.float64)
                    g_m = gradient(lambda v, x=x_m, u=uniform: F.cross_entropy(outputs(net, v, x), u), slow)
                    g = g - part(g, g_m) * g_m
                w = w - lr * (g + decay * w)
                x_s, p_s, x_p, y = made[step % len(made)]
                middle = beta * w + (1 - beta) * w0
                g_s = gradient(lambda v, x=x_s, p=p_s: F.cross_entropy(outputs(net, v, x), p), middle)
                g_p = gradient(lambda v, x=x_p, y=y: loss_at(net, v, x, y), middle)
                for g, wanted in ((g_s, pseudo), (g_p, perturbed)):
                    if wanted:
                        w = w - part(w - w0, g).clamp(min=0) * g
            models.append(w)
        w0 = sum(models) / len(models)
    return w0


def make(**kwargs):
    return FedReg(**{"eta_s": ETA_S, "eta_p": ETA_P, "iterations": STEPS} | kwargs)


CASES = [
    (0.5, 0.5, True, True, False),
    (0.25, 1.0, True, True, True),
    (1.0, 0.5, True, False, False),
    (0.0, 0.3, False, True, False),
    (1.0, 0.5, False, False, True),
]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("gamma", "beta", "pseudo", "perturbed", "private"), CASES)
def test_it_is_the_plain_loop(federation, k, gamma, beta, pseudo, perturbed, private):
    """Weight decay is in the step that is regularized."""
    switches = {"gamma": gamma, "beta": beta, "pseudo": pseudo, "perturbed": perturbed, "private": private}
    solver = sgd(weight_decay=0.01)
    ours = train_rounds(make_net(), federation, solver, rounds=2, methods=[make(**switches)], k=k)
    theirs = reference(make_net(), federation, solver, rounds=2, decay=0.01, **switches)
    fedavg = train_rounds(make_net(), federation, solver, rounds=2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert (ours - fedavg).norm() > 1e-3


def test_without_its_parts_it_is_fedavg_bit_for_bit(federation):
    solver = sgd(momentum=0.5)
    method = make(gamma=1.0, pseudo=False, perturbed=False)
    ours = train_rounds(make_net(), federation, solver, rounds=4, methods=[method], k=2)
    fedavg = train_rounds(make_net(), federation, solver, rounds=4, k=2)
    assert torch.equal(ours, fedavg)


def test_the_first_step_of_a_round_is_plain_whatever_gamma(federation):
    """At the broadcast model there is nothing to mix: γ changes nothing in a round of one step."""
    runs = [train_rounds(make_net(), federation, sgd(steps=1), rounds=3, methods=[make(gamma=g)]) for g in (1.0, 0.3)]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-15)


class Watch(FedReg):
    """Keeps by how much the loss on a step's pseudo data is above that of the broadcast model; may do no more."""

    def after_step(self, stack, batch):
        own = stack.prepared[self]["pass"]
        turn = int(own._next[0])
        x, labels = (t[0, turn] for t in own._made[:2])
        if self.regularizes:
            super().after_step(stack, batch)
        else:
            own.next(1)
        states = (torch.cat([t[name].detach().flatten() for name in stack.start]) for t in (stack.start, stack.full))
        before, after = (F.cross_entropy(outputs(stack.net, w, x), labels).item() for w in states)
        self.growth.append(after - before)


def test_clients_forget_less_of_the_pseudo_data():
    growth = {}
    for regularizes in (False, True):
        method = Watch(1.0, perturbed=False, eta_s=ETA_S)
        method.regularizes, method.growth = regularizes, []
        train_rounds(make_net(), random_federation((8,)), sgd(epochs=5), rounds=1, methods=[method], cohort_of=1)
        growth[regularizes] = method.growth
    assert min(growth[False]) > 0
    assert all(ours < plain for ours, plain in zip(growth[True], growth[False], strict=True))
    assert growth[True][-1] < 0.5 * growth[False][-1]


def test_pseudo_data_of_unequal_clients(federation):
    """Each climbs the loss, keeps its labels, and goes round in its own client's pass, as long as that client's."""
    net, clients = make_net(), np.array([1, 0, 4])
    start = broadcast_state(net)
    stack = ClientStack(net, start, clients, federation.sizes(clients), np.array([9, 9, 9]))
    download = Download(2, 5, 0.1, start, clients)
    made = PseudoPass(stack, federation, sgd(), download, (ETA_S, ETA_P), STEPS)
    passes = [own_pass(federation, k, 2) for k in clients]
    for turn in range(5):
        x_s, p_s, x_p, y, weight = made.next(3)
        for row, batches_of in enumerate(passes):
            x, labels = batches_of[turn % len(batches_of)]
            n = len(x)
            torch.testing.assert_close(x_s[row, :n], climbed(net, weights(net), x, labels, ETA_S), rtol=0, atol=1e-14)
            torch.testing.assert_close(x_p[row, :n], climbed(net, weights(net), x, labels, ETA_P), rtol=0, atol=1e-14)
            torch.testing.assert_close(p_s[row, :n], net(x_s[row, :n]).softmax(-1), rtol=0, atol=1e-14)
            assert torch.equal(y[row, :n], labels)
            assert torch.equal(weight[row], (torch.arange(4) < n) / torch.tensor(n, dtype=torch.float64))
            assert F.cross_entropy(net(x_s[row, :n]), labels) > F.cross_entropy(net(x), labels)


def test_a_pass_is_made_as_far_as_steps_reach(federation):
    stack = ClientStack(make_net(), broadcast_state(make_net()), np.array([1]), np.array([12]), np.array([2]))
    download = Download(0, 5, 0.1, stack.start, np.array([1]))
    made = PseudoPass(stack, federation, sgd(), download, (1.0, 1.0), 1)
    assert made._made[0].shape == (1, 2, 4, 6)  # of three batches


def test_climbing_leaves_the_samples_alone(federation):
    x = federation.x[:4].view(1, 4, 6)
    stack = ClientStack(make_net(), broadcast_state(make_net()), np.array([0]), np.array([4]), np.array([1]))
    kept = x.clone()
    moved = climb(stack, x, federation.y[:4].view(1, 4), 0.1, 2)
    assert torch.equal(x, kept)
    assert not moved.requires_grad
    assert (moved - x).abs().max() <= 0.2 + 1e-12


def test_networks_with_dropout_make_pseudo_data_without_it(federation):
    """So a stack of clients, whose dropout differs, knows one w₀."""
    net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 4)).double()
    clients = np.array([1, 0])
    stack = ClientStack(net, broadcast_state(net), clients, federation.sizes(clients), np.array([9, 9]))
    download = Download(2, 5, 0.1, stack.start, clients)
    x_s, p_s, *_ = PseudoPass(stack, federation, sgd(), download, (ETA_S, ETA_P), STEPS).next(2)
    assert net.training
    net.eval()
    for row, k in enumerate(clients):
        x, labels = own_pass(federation, k, 2)[0]
        n = len(x)
        torch.testing.assert_close(x_s[row, :n], climbed(net, weights(net), x, labels, ETA_S), rtol=0, atol=1e-14)
        torch.testing.assert_close(p_s[row, :n], net(x_s[row, :n]).softmax(-1), rtol=0, atol=1e-14)


def test_frozen_layers_stay(federation):
    net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 4)).double()
    net[0].weight.requires_grad_(False)
    frozen, rest = net[0].weight.clone(), net[2].weight.clone()
    train_rounds(net, federation, sgd(), rounds=2, methods=[make(private=True)], k=3)
    assert torch.equal(net[0].weight, frozen)
    assert not torch.equal(net[2].weight, rest)


def test_what_cannot_work_is_refused():
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"methods\.fedreg .* words have none"):
        FedReg().meet(make_setup(words))
    with pytest.raises(ValueError, match="FedReg and Sam both move the weights"):
        validate_parts(make_setup(make_net(), methods=[FedReg(), Sam()]))
