"""Personalised methods equal plain loops in float64: the global model, personal
models and tests.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import refuses
from harness import Sizes, assert_near, make_net, make_setup, random_federation, sgd, train_rounds
from plain_reference import batches, cohort
from torch.nn.utils.parametrizations import weight_norm

from gcfed.federated.parts import ClientPart, Order
from gcfed.federated.parts.refusals import validate_parts
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.objective.fedntd import FedNTD
from gcfed.methods.objective.proximal import Proximal
from gcfed.methods.personal.apfl import APFL
from gcfed.methods.personal.ditto import Ditto
from gcfed.methods.personal.fedrep import FedRep
from gcfed.methods.personal.pfedme import PFedMe
from gcfed.methods.personal.tensors import Personal
from gcfed.methods.server.fedexp import FedExP
from gcfed.metrics.local_models import Personal as PersonalMetric
from gcfed.metrics.updates import Drift

ROUNDS = 2
LR = 0.25
DECAY = 0.5
WEIGHT_DECAY = 0.03
HEAD = (2, 3)  # the indices of the head's weight and bias among four tensors


def logits(w, x):
    return (x @ w[0].T + w[1]).tanh() @ w[2].T + w[3]


def gradients(w, x, y):
    """The gradients of the mean loss, with weight decay."""
    leaves = [t.detach().requires_grad_() for t in w]
    grads = torch.autograd.grad(F.cross_entropy(logits(leaves, x), y), leaves)
    return [g + WEIGHT_DECAY * t.detach() for g, t in zip(grads, leaves, strict=True)]


def moved(w, grads, lr):
    return [t - lr * g for t, g in zip(w, grads, strict=True)]


def apart(a, b):
    return [s - t for s, t in zip(a, b, strict=True)]


class Plain:
    """FedAvg.

    ``local`` trains one client. It returns the weights for the server's mean, and the personal
    model.
    """

    momentum = 0.0
    kept = ()

    def __init__(self):
        self.states = {}

    def local(self, k, w0, steps, lr):
        w = [*w0]
        velocity = [0.0] * 4
        for i in self.kept:
            w[i] = self.states.get((k, i), w0[i])
        for s, (x, y) in enumerate(steps):
            decay = [WEIGHT_DECAY * t for t in w]
            frozen = self.frozen(s, len(steps))
            full = gradients(w, x, y)
            velocity = [
                self.momentum * v + (d if i in frozen else g)
                for i, (v, d, g) in enumerate(zip(velocity, decay, full, strict=True))
            ]
            w = [
                t if i in frozen else t - lr * v
                for i, (t, v) in enumerate(zip(w, velocity, strict=True))
            ]
        self.states |= {(k, i): w[i] for i in self.kept}
        return w, w

    def frozen(self, step, count):
        return ()


class PlainFedPer(Plain):
    momentum = 0.6
    kept = HEAD


class PlainLG(Plain):
    momentum = 0.6
    kept = (0, 1)


class PlainFedRep(PlainFedPer):
    """Trains the head in the share 0.6 of 2, 4 and 6 steps."""

    def frozen(self, step, count):
        return (0, 1) if step < {2: 1, 4: 2, 6: 3}[count] else HEAD


class PlainFedBABU(PlainFedPer):
    def frozen(self, step, count):
        return HEAD


class PlainDitto(Plain):
    lam = 0.7

    def local(self, k, w0, steps, lr):
        w = w0
        v = self.states.get(k, w0)
        for x, y in steps:
            v = moved(moved(v, gradients(v, x, y), lr), apart(v, w0), lr * self.lam)
            w = moved(w, gradients(w, x, y), lr)
        self.states[k] = v
        return w, v


class PlainAPFL(Plain):
    alpha = 0.4

    def local(self, k, w0, steps, lr):
        w = w0
        v, alpha = self.states.get(k, (w0, self.alpha))
        for x, y in steps:
            mixed = [alpha * a + (1 - alpha) * b for a, b in zip(v, w, strict=True)]
            grads = [
                g - WEIGHT_DECAY * t for g, t in zip(gradients(mixed, x, y), mixed, strict=True)
            ]
            slope = sum(((a - b) * g).sum() for a, b, g in zip(v, w, grads, strict=True))
            v = moved(v, [alpha * g + WEIGHT_DECAY * t for g, t in zip(grads, v, strict=True)], lr)
            w = moved(w, gradients(w, x, y), lr)
            alpha = float((alpha - lr * slope).clamp(0, 1))
        self.states[k] = v, alpha
        return w, [alpha * a + (1 - alpha) * b for a, b in zip(v, w, strict=True)]


class PlainAPFLFromOne(PlainAPFL):
    """Without a limit, some clients' α would exceed 1."""

    alpha = 1.0


class PlainPFedMe(Plain):
    lam = 4.0
    lr = 0.05
    inner_steps = 3

    def local(self, k, w0, steps, lr):
        w = theta = w0
        for x, y in steps:
            for _ in range(self.inner_steps):
                grads = [
                    g + self.lam * d
                    for g, d in zip(self.inner(theta, x, y), apart(theta, w), strict=True)
                ]
                theta = moved(theta, self.projected(grads, theta), lr)
            w = moved(w, apart(w, theta), self.lr * self.lam)
        return w, theta

    inner = staticmethod(gradients)

    def projected(self, grads, theta):
        return grads


class PlainPFedMeGC(PlainPFedMe):
    """Local GC acts on each inner gradient of the body. SGD adds weight decay later."""

    def projected(self, grads, theta):
        weight = grads[0] - WEIGHT_DECAY * theta[0]
        return [weight - weight.mean(1, keepdim=True) + WEIGHT_DECAY * theta[0], *grads[1:]]


class Seen(ClientPart):
    """Records the last personal model of each client that took part."""

    order = Order.MEASURES

    def __init__(self):
        self.models = {}

    def on_clients_end(self, stack, download):
        for row, k in enumerate(stack.clients.tolist()):
            self.models[k] = [t[row].clone() for t in (stack.full | stack.personal).values()]


def with_tests(data):
    """The first third of each client's samples is also its test split."""
    data.client_test = 0.3
    tests = [own[: len(own) // 3] for own in data.clients]
    data.tests_of_clients = SimpleNamespace(client=lambda k: tests[k])
    return data


CASES = {  # the method, its plain loop, and how many of 59 values it sends and receives
    "fedper": ([Personal()], PlainFedPer, 35),
    "lgfedavg": ([Personal("body", ["2"])], PlainLG, 24),
    "fedrep": ([FedRep(0.6)], PlainFedRep, 35),
    "fedbabu": ([FedRep(0.0)], PlainFedBABU, 35),
    "ditto": ([Ditto(0.7)], PlainDitto, 59),
    "apfl": ([APFL(0.4)], PlainAPFL, 59),
    "apfl, α = 1": ([APFL(1.0)], PlainAPFLFromOne, 59),
    "pfedme": ([PFedMe(4.0, lr=0.05, inner_steps=3)], PlainPFedMe, 59),
    "pfedme, GC": (
        [PFedMe(4.0, lr=0.05, inner_steps=3), GradientCentralization(server=False, boundary="2")],
        PlainPFedMeGC,
        59,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_plain_loop(case):
    """Stacks have two clients or one, with different numbers of steps.

    Models, tests and bytes are compared.
    """
    methods, plain, sent = CASES[case]
    plain = plain()
    net = make_net()
    data = with_tests(random_federation())
    seen = Seen()
    sizes = Sizes()
    rows = []
    solver = sgd(lr=LR, momentum=plain.momentum, weight_decay=WEIGHT_DECAY, lr_decay=DECAY)
    expected = [p.detach().clone() for p in net.parameters()]
    ours = train_rounds(
        net,
        data,
        solver,
        rounds=ROUNDS,
        methods=[*methods, seen, sizes, PersonalMetric(every=1), Drift()],
        k=2,
        on_round=lambda round, row: rows.append(row),
    )
    personal = {}
    for t in range(ROUNDS):
        lr = LR * DECAY**t
        uploads = []
        now = {}
        for k in cohort(data, t, 3):
            w, now[k] = plain.local(k, expected, list(batches(data, solver, k, t)), lr)
            uploads.append(w)
        accuracies = []
        for k, w in now.items():
            i = data.tests_of_clients.client(k)
            if len(i):
                is_right = logits(w, data.x[i]).argmax(1) == data.y[i]
                accuracies.append(float(is_right.double().mean()))
        assert rows[t]["personal/local_acc"] == pytest.approx(np.mean(accuracies))
        assert rows[t]["personal/local_worst10"] == pytest.approx(min(accuracies))
        steps = [
            [t.flatten() for i, t in enumerate(apart(w, expected)) if i not in plain.kept]
            for w in uploads
        ]
        assert rows[t]["drift/client_norm"] == pytest.approx(
            np.mean([float(torch.cat(s).norm()) for s in steps])
        )
        means = [sum(ts) / len(uploads) for ts in zip(*uploads, strict=True)]
        expected = [
            old if i in plain.kept else new
            for i, (old, new) in enumerate(zip(expected, means, strict=True))
        ]
        personal |= now
    assert_near(ours, torch.cat([t.flatten() for t in expected]), 1e-10)
    assert seen.models.keys() == personal.keys()
    for k, model in personal.items():
        assert_near(seen.models[k], model, 1e-10)
    assert {*sizes.up} == {*sizes.down} == {sent * 8}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            [Personal(head=["2", "3"])],
            r"Personal: head=\['2', '3'\] must be modules with tensors, and not all, of 0, 1, 2",
        ),
        ([Personal(head=["0", "2"])], r"Personal: head=\['0', '2'\] must be"),
        ([Personal(), Scaffold()], "Personal does not combine with Scaffold, which compares"),
        ([Personal(), Ditto()], "Personal does not combine with Ditto, which compares"),
        ([FedRep(), Proximal()], "FedRep does not combine with Proximal, which compares"),
        (
            [Personal("body"), FedNTD()],
            "Personal does not combine with FedNTD: no broadcast model is complete",
        ),
        ([Ditto(), FedRep()], "methods: Ditto and FedRep both move the weights of a step"),
        ([PFedMe(), Ditto()], "methods: PFedMe and Ditto both move the weights of a step"),
    ],
)
def test_combinations_with_another_result_are_refused(methods, message):
    setup = make_setup(make_net(), methods=methods, data=random_federation())
    with refuses(message):
        validate_parts(setup)
        for part in setup.parts:
            part.join_run(setup)


def test_the_head_is_the_last_module_with_a_weight():
    first, tanh, last = make_net()
    for net in (
        make_net(),
        torch.nn.Sequential(first, torch.nn.Sequential(tanh, weight_norm(last))),
    ):
        own = [
            f"{place}.{name}"
            for place, m in net.named_modules()
            if place in {"2", "1.1"}
            for name in m.state_dict()
        ]
        method = Personal()
        setup = make_setup(net, methods=[method], data=random_federation())
        assert method.parts[0].personal_tensors(setup) == own


def test_the_server_must_not_decay_personal_tensors():
    server = partial(torch.optim.SGD, lr=1.0, weight_decay=0.1)
    with refuses(r"FedRep needs server\.weight_decay=0"):
        validate_parts(
            make_setup(make_net(), methods=[FedRep()], data=random_federation(), server=server)
        )


def test_a_frozen_tensor_needs_no_finite_gradient():
    data = random_federation()
    rows = []
    data.x[:, 0] = float("inf")  # tanh is ±1, and its gradient by the body's weights is 0 · ∞
    record = {"on_round": lambda _, row: rows.append(row)}
    train_rounds(make_net(), data, sgd(clip_norm=1.0), rounds=1, methods=[FedRep(1.0)], **record)
    assert rows[0]["train/nonfinite_clients"] == 0


@pytest.mark.parametrize("first", [False, True])
def test_fedbabu_equals_a_frozen_head(first):
    """This also holds if the server lengthens its step."""
    runs = []
    for methods in ([FedExP()], [FedRep(0.0), FedExP()] if first else [FedExP(), FedRep(0.0)]):
        net = make_net()
        net[2].requires_grad_(len(methods) > 1)
        runs.append(train_rounds(net, rounds=2, methods=methods))
    assert torch.equal(*runs)
