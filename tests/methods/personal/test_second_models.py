"""Ditto, APFL and pFedMe: the second model does not change the first, and needs plain steps."""

import pytest
import torch
import torch.nn.functional as F
from harness import assert_near, make_net, make_setup, random_federation, sgd, train_rounds, weights
from plain_reference import batches
from test_personal import Seen, logits, moved

from gcfed.federated.parts import ClientPart, Order
from gcfed.federated.parts.refusals import validate_parts
from gcfed.methods.personal.apfl import APFL
from gcfed.methods.personal.ditto import Ditto
from gcfed.methods.personal.pfedme import PFedMe


class OwnMean(torch.nn.Module):
    """Replaces its running mean instead of changing it in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("method", [Ditto(0.0), APFL(1.0)])
def test_both_models_have_their_own_running_statistics(method):
    """The global model equals FedAvg's.

    For a single client, the personal model equals the global one.
    """
    seen = Seen()
    found = []
    for methods in ([], [method, seen]):
        first, _, last = make_net()
        net = torch.nn.Sequential(
            first, OwnMean(), torch.nn.BatchNorm1d(5, momentum=None).double(), last
        )
        train_rounds(
            net, random_federation(sizes=(10,)), sgd(), rounds=2, methods=methods, cohort_of=1
        )
        found.append([t.double() for t in (*net.parameters(), *net.buffers())])
    assert all(map(torch.equal, *found))
    assert_near([t.double() for t in seen.models[0]], found[0], 1e-12)


class Poison(ClientPart):
    """Makes client 1's v infinite in the first round.

    Records which clients start a round with v = w.
    """

    order = Order.MOVES_WEIGHTS

    def __init__(self):
        self.same = []

    def prepare(self, stack, own, download):
        (ditto,) = [part for part in stack.prepared if isinstance(part, Ditto)]
        v = stack.prepared[ditto]["v"]["0.bias"]
        self.same.append((v == stack.full["0.bias"]).all(1).tolist())
        if download.round_index == 0:
            v[stack.clients == 1] = torch.inf


def test_a_personal_model_may_diverge_alone():
    """Its client does not keep it, and the global model equals FedAvg's."""
    data = random_federation(sizes=(8, 8, 8))
    poison = Poison()
    runs = [
        train_rounds(make_net(), data, sgd(), rounds=2, methods=m, k=3)
        for m in ([], [Ditto(0.5), poison])
    ]
    assert torch.equal(*runs)
    assert poison.same == [[True, True, True], [False, True, False]]


def test_second_models_need_plain_steps():
    for method in (Ditto(), APFL(), PFedMe()):
        with pytest.raises(ValueError, match=r"needs client\.optimizer\.momentum=0"):
            validate_parts(make_setup(make_net(), methods=[method], solver=sgd(momentum=0.9)))
    with pytest.raises(ValueError, match=r"PFedMe needs client\.clip_norm=null"):
        validate_parts(make_setup(make_net(), methods=[PFedMe()], solver=sgd(clip_norm=1.0)))


def test_ditto_without_a_pull_trains_locally_and_pfedme_with_lambda_0_keeps_the_model():
    """With λ = 0, v does not depend on other clients. With ηλ = 0, w does not change."""
    data = random_federation(sizes=(8, 12))
    seen = Seen()
    net = make_net()
    train_rounds(net, data, sgd(), rounds=2, methods=[Ditto(0.0), seen], cohort_of=2)
    for k in (0, 1):
        w = [p.detach() for p in make_net().parameters()]
        for t in range(2):
            for x, y in batches(data, sgd(), k, t):
                leaves = [p.clone().requires_grad_() for p in w]
                grads = torch.autograd.grad(F.cross_entropy(logits(leaves, x), y), leaves)
                w = moved(w, grads, 0.1)
        assert_near(seen.models[k], w, 1e-12)
    start = weights(make_net())
    assert torch.equal(
        train_rounds(make_net(), data, sgd(), rounds=1, methods=[PFedMe(0.0)], cohort_of=2), start
    )


def test_a_second_model_counts_its_own_batches():
    """In the second round, w starts with the clients' mean count, 9, and v with its own count, 6 or
    12.
    """
    seen = Seen()
    first, _, last = make_net()
    net = torch.nn.Sequential(first, torch.nn.BatchNorm1d(5).double(), last)
    train_rounds(
        net,
        random_federation(sizes=(10, 22)),
        sgd(),
        rounds=2,
        methods=[Ditto(), seen],
        cohort_of=2,
    )
    assert [float(seen.models[k][-1]) for k in (0, 1)] == [12, 24]
    assert float(net[1].num_batches_tracked) == 18
