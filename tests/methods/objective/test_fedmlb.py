"""FedMLB: hybrid paths are written by hand.

They use the client's layers first, then the broadcast layers.
"""

import pytest
import torch
import torch.nn.functional as F
from harness import join_run, make_setup
from plain_clients import check, federation, layers

from gcfed.methods.objective.fedmlb import FedMLB
from gcfed.models.mlp import MLP


@pytest.mark.parametrize("sequences", [False, True])
def test_rounds_equal_an_independent_loop(sequences):
    ce = 0.2
    kl = 0.7
    tau = 2.0

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

    check(FedMLB(ce, kl, tau), federation(sequences), objective)


def test_a_network_of_one_stage_is_refused():
    with pytest.raises(ValueError, match=r"methods\.fedmlb needs two stages; model=MLP has one"):
        join_run(FedMLB(), make_setup(MLP(input_shape=(6,), num_classes=4, hidden=())))
