"""FedMLB: hybrid paths built by hand, client layers first and broadcast layers after."""

import pytest
import torch
import torch.nn.functional as F
from harness import make_setup, train_rounds
from plain_clients import ROUNDS, SOLVER, Bytes, Net, federation, layers, plain_rounds

from gcfed.methods.fedmlb import FedMLB
from gcfed.models.mlp import MLP


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize(("ce", "kl", "tau"), [(1.0, 1.0, 1.0), (0.2, 0.7, 2.0)])
def test_rounds_equal_an_independent_loop(k, sequences, ce, kl, tau):
    data = federation(sequences)

    def objective(w, start, client, x, y, previous):
        h1, h2, logits = layers(w, x)
        hybrids = [layers(start, h1, first=1)[-1], layers(start, h2, first=2)[-1]]
        logits, *hybrids = (z.flatten(0, -2)[y.flatten() >= 0] for z in (logits, *hybrids))
        y = y.flatten()[y.flatten() >= 0]
        p = torch.softmax(logits / tau, 1)
        q = [torch.softmax(z / tau, 1) for z in hybrids]
        divergences = [(q_m * torch.log(q_m / p)).sum(1).mean() for q_m in q]
        crosses = [F.cross_entropy(z, y) for z in hybrids]
        return F.cross_entropy(logits, y) + ce * sum(crosses) / 2 + kl * sum(divergences) / 2

    expected = plain_rounds(data, objective)
    got = train_rounds(Net(), data, SOLVER, rounds=ROUNDS, methods=[FedMLB(ce, kl, tau), Bytes()], k=k)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_a_network_of_one_stage_is_refused():
    with pytest.raises(ValueError, match=r"methods\.fedmlb .*model=MLP has a single stage"):
        FedMLB().meet(make_setup(MLP(input_shape=(6,), num_classes=4, hidden=())))
