"""FedReg equals a plain loop of its algorithm, and refuses settings that cannot work."""

import pytest
import torch
from conftest import refuses
from harness import assert_near, join_run, make_net, make_setup, plan_of, sgd, train_rounds, weights
from plain_reference import batches, cohort, gradient, loss_at, tensors
from torch import nn
from torch.func import functional_call

from gcfed.federated.parts.refusals import validate_parts
from gcfed.methods.objective.fedreg import FedReg
from gcfed.methods.sharpness.sam import Sam
from gcfed.utils.rng import torch_seed

ETA_S = 0.2
ETA_P = 0.05
STEPS = 2


def outputs(net, w, x):
    return functional_call(net, tensors(net, w), (x,))


def climbed(net, w0, x, y, eta):
    for _ in range(STEPS):
        x = x.clone().requires_grad_()
        x = (x + eta * torch.autograd.grad(loss_at(net, w0, x, y), x)[0].sign()).detach()
    return x


def own_pass(data, client, t, seed=5):
    plan = plan_of(data, [client], torch_seed(seed, "pseudo"), t, epochs=1)
    return [data.fetch(plan.index[0, i, :count], None) for i, count in enumerate(plan.counts[0])]


def reference(net, data, solver, *, rounds, gamma, beta, pseudo, perturbed, lr=0.1, decay=0.0):
    w0 = weights(net)
    for t in range(rounds):
        models = []
        for k in cohort(data, t, 3):
            made = []
            for x, y in own_pass(data, k, t):
                x_s = climbed(net, w0, x, y, ETA_S)
                made.append(
                    (
                        x_s,
                        outputs(net, w0, x_s).softmax(-1).detach(),
                        climbed(net, w0, x, y, ETA_P),
                        y,
                    )
                )
            w = w0
            for step, (x, y) in enumerate(batches(data, solver, k, t)):
                g = gradient(net, gamma * w + (1 - gamma) * w0, x, y)
                w = w - lr * (g + decay * w)
                x_s, p_s, x_p, y = made[step % len(made)]
                middle = beta * w + (1 - beta) * w0
                g_s, g_p = (gradient(net, middle, *pair) for pair in ((x_s, p_s), (x_p, y)))
                for g, wanted in ((g_s, pseudo), (g_p, perturbed)):
                    if wanted:
                        w = w - (((w - w0) @ g) / (g @ g)).clamp(min=0) * g
            models.append(w)
        w0 = sum(models) / len(models)
    return w0


def make(gamma=0.5, **kwargs):
    return FedReg(gamma, **{"eta_s": ETA_S, "eta_p": ETA_P, "iterations": STEPS} | kwargs)


CASES = [(0.5, 0.5, True, True), (1.0, 1.0, True, False), (0.0, 0.3, False, True)]


@pytest.mark.parametrize(("gamma", "beta", "pseudo", "perturbed"), CASES)
def test_it_equals_the_plain_loop(federation, gamma, beta, pseudo, perturbed):
    """The regularized step includes weight decay."""
    switches = {"gamma": gamma, "beta": beta, "pseudo": pseudo, "perturbed": perturbed}
    solver = sgd(weight_decay=0.01)
    ours = train_rounds(make_net(), federation, solver, rounds=2, methods=[make(**switches)], k=2)
    theirs = reference(make_net(), federation, solver, rounds=2, decay=0.01, **switches)
    assert_near(ours, theirs, 1e-10)


def test_impossible_settings_are_refused():
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    with refuses(r"methods\.fedreg .* tokens have none"):
        join_run(FedReg(), make_setup(words))
    with refuses("FedReg and Sam both move the weights"):
        validate_parts(make_setup(make_net(), methods=[FedReg(), Sam()]))
