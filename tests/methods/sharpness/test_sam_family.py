"""SAM's moves with the corrections of SCAFFOLD, FedDyn, FedGloSS and FedCM equal the papers' rules
on flat vectors.
"""

from types import SimpleNamespace

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, fedwmsam, gradient

from gcfed.methods.correction.feddyn import FedDyn
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.momentum.fedcm import FedCM
from gcfed.methods.sharpness.fedgloss import FedGloSS
from gcfed.methods.sharpness.fedsmoo import DualSam
from gcfed.methods.sharpness.fedwmsam import FedWMSAM
from gcfed.methods.sharpness.sam import Sam

RHO = 0.3
LR = 0.1
ROUNDS = 3


def unit(v):
    return v / v.norm() if v.any() else v


def by_hand(net, data, move, correction="", alpha=1.0):
    """Three of five clients train in a round.

    FedDyn's h has strength 0.5, FedCM's Δ weight 0.4, FedGloSS ρ = 0.4.
    """
    w0 = weights(net)
    n = len(data.clients)
    zero = torch.zeros_like(w0)
    clients = [SimpleNamespace(old=None, c=zero, h=zero, mu=zero) for _ in range(n)]
    c = h = momentum = s = last = zero
    dynamic = correction in ("feddyn", "fedgloss")
    for t in range(ROUNDS):
        sent = []
        model = w0
        if correction == "fedgloss":
            w0 = w0 - 0.4 * unit(last)  # where clients start
        for k in cohort(data, t, 3):
            own = clients[k]
            w = w0
            steps = []
            shift = zero
            back = zero if own.old is None else own.old - w0
            for x, y in batches(data, sgd(), k, t):
                g = gradient(net, w, x, y)
                if move in ("own", "mixed"):
                    shift = RHO * unit(g)
                elif move == "last_update":
                    shift = RHO * unit(back)
                elif move == "dual":
                    shift = RHO * unit(g - own.mu - s)
                    own.mu = own.mu + shift - s
                step = (
                    alpha * (gradient(net, w + shift, x, y) if shift.any() else g) + (1 - alpha) * g
                )
                if correction == "scaffold":
                    step = step - own.c + c
                elif dynamic:
                    step = step - own.h + 0.5 * (w - w0)
                elif correction == "fedcm":
                    step = 0.4 * step + 0.6 * momentum
                w = w - LR * step
                steps.append(step)
            new_c = own.c - c + (w0 - w) / (len(steps) * LR)
            sent.append(SimpleNamespace(w=w, c=new_c - own.c, steps=steps, mu=own.mu - shift))
            own.c = new_c
            own.h = own.h - 0.5 * (w - w0)
            own.old = w0
        mean = torch.stack([one.w for one in sent]).mean(0)
        c = c + sum(one.c for one in sent) / n
        h = h - 0.5 * sum(one.w - w0 for one in sent) / n
        momentum = torch.stack([step for one in sent for step in one.steps]).mean(0)
        s = RHO * unit(sum(one.mu for one in sent))
        last = mean - w0
        w0 = model + last - (h / 0.5 if dynamic else 0.0)
    return w0


MOVES = {
    "own": lambda: Sam(RHO),
    "last_update": lambda: Sam(RHO, direction="last_update"),
    "dual": lambda: DualSam(RHO),
    "mixed": lambda: Sam(RHO, alpha=0.3),
}
CORRECTIONS = {
    "": list,
    "scaffold": lambda: [Scaffold()],
    "feddyn": lambda: [FedDyn(0.5)],
    "fedcm": lambda: [FedCM(0.4)],
    "fedgloss": lambda: [FedGloSS(0.4, alpha=0.5)],
}


@pytest.mark.parametrize(
    ("move", "correction"),
    [
        ("own", "scaffold"),
        ("own", "fedcm"),
        ("last_update", ""),
        ("last_update", "scaffold"),
        ("last_update", "feddyn"),
        ("dual", "feddyn"),
        ("mixed", "feddyn"),
        ("own", "fedgloss"),
    ],
)
def test_a_move_and_a_correction(federation, move, correction):
    """``mixed`` is FedSpeed, which mixes the gradients at w̃ and at w."""
    expected = by_hand(
        make_net(), federation, move, correction, alpha=0.3 if move == "mixed" else 1.0
    )
    methods = [MOVES[move](), *CORRECTIONS[correction]()]
    found = train_rounds(make_net(), federation, sgd(lr=LR), rounds=ROUNDS, methods=methods, k=2)
    assert_near(found, expected, 1e-10)


@pytest.mark.parametrize(
    ("alpha", "lr", "low", "high"), [(0.3, LR, 0.0, 0.9), (0.9, 5.0, 0.9, 2.0)]
)
def test_fedwmsam_without_a_client_that_is_not_finite(federation, alpha, lr, low, high):
    method = FedWMSAM(RHO, alpha=alpha)
    data = broken(federation, 3)
    expected, last, value = fedwmsam(
        make_net(), data, alpha, lr, 3, ROUNDS, lambda ahead: RHO * unit(ahead)
    )
    assert low < value < high  # values above 0.9 are clipped
    found = train_rounds(make_net(), data, sgd(lr=lr), rounds=ROUNDS, methods=[method], k=2)
    assert_near(found, expected, 1e-10)
    change = method.parts[-1].server_state("alpha", {})["change"]
    assert alpha + change.item() == pytest.approx(last, abs=1e-12)
