"""Forgetting against NumPy, in the plain loop: every local model on the data of every client of the cohort."""

import numpy as np
import pytest
import torch
from harness import ArrayData, make_net, random_federation
from recording import EXACT, NAN_CLIENT, measured
from torch import nn

from gcfed.metrics.local_models import Forgetting
from gcfed.utils.rng import generator


def cross_entropy(state, x, y):
    """Of the network below, whose dropout is layer 2."""
    logits = np.tanh(x @ state["0.weight"].T + state["0.bias"]) @ state["3.weight"].T + state["3.bias"]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -log_p[np.arange(len(y)), y].mean()


def with_dropout():
    net = make_net()
    net.insert(2, nn.Dropout(0.5))
    return net


@pytest.mark.parametrize(("k", "poisoned", "samples"), [(1, False, None), (3, True, 6)])
def test_every_model_on_everybodys_data(k, poisoned, samples, monkeypatch):
    """In parts of five samples, which cut through the clients."""
    monkeypatch.setattr("gcfed.metrics.local_models.AT_ONCE", 5)
    data, net = random_federation(), with_dropout()
    rows, seen, _ = measured(Forgetting(1, samples), net, data, k=k, poisoned=poisoned, cohort_of=4)
    assert net.training
    for t, (row, (start, clients)) in enumerate(zip(rows, seen, strict=True)):
        drawn = {}
        cohort = sorted(clients)
        for i in cohort:
            own = data.client(i)
            if samples is not None and len(own) > samples:
                own = generator(5, "forgetting", t, i).choice(own, samples, replace=False)
            drawn[i] = data.x[own].numpy(), data.y[own].numpy()
        after = {
            k: {i: cross_entropy(w_k, *drawn[i]) for i in cohort}
            for k, w_k in clients.items()
            if not (poisoned and k == NAN_CLIENT)
        }
        others = [np.mean([loss for i, loss in losses.items() if i != k]) for k, losses in after.items()]
        assert row == {
            "forgetting/before": pytest.approx(
                np.average([cross_entropy(start, *drawn[i]) for i in cohort], weights=data.sizes(cohort)), **EXACT
            ),
            "forgetting/after": pytest.approx(np.mean([[*losses.values()] for losses in after.values()]), **EXACT),
            "forgetting/own": pytest.approx(np.mean([losses[k] for k, losses in after.items()]), **EXACT),
            "forgetting/others": pytest.approx(np.mean(others), **EXACT),
        }


def test_of_a_lone_client_nobody_can_be_forgotten():
    (row,), _, _ = measured(Forgetting(1), make_net(), random_federation(), rounds=1, cohort_of=1)
    assert row.keys() == {"forgetting/before", "forgetting/after", "forgetting/own"}
    assert row["forgetting/after"] == row["forgetting/own"]


def test_sequences_count_their_labels():
    """Labels at every position, −100 where there is none: a loss is the mean over labels, here of both clients'."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 5, 6, generator=g, dtype=torch.float64), torch.randint(4, (10, 5), generator=g)
    y[torch.rand(10, 5, generator=g) < 0.4] = -100
    data = ArrayData(x, y, [np.arange(3), np.arange(3, 10)])
    torch.manual_seed(0)
    net = nn.Linear(6, 4).double()
    (row,), ((start, _),), _ = measured(Forgetting(1), net, data, rounds=1, cohort_of=2)
    logits = x @ torch.tensor(start["weight"]).T + torch.tensor(start["bias"])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    assert row["forgetting/before"] == pytest.approx(loss, **EXACT)
