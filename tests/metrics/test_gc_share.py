"""gc/share_*: the share that P removes equals its definition with a matrix P, and is zero after a
LayerNorm.
"""

from functools import partial

import numpy as np
import pytest
import torch
from harness import make_net, random_federation
from recording import EXACT, NAN_CLIENT, measured
from torch import nn

from gcfed.methods.momentum.lookahead import LookAhead
from gcfed.metrics.gc_share import GCShare


def share(tensor):
    """‖(I − P)G‖² / ‖G‖² with the matrix P = I − eeᵀ, e = 1/√m · (1 … 1)."""
    rows = np.reshape(tensor, (len(tensor), -1))
    e = np.full((rows.shape[1], 1), rows.shape[1] ** -0.5)
    return np.sum((rows @ (e @ e.T)) ** 2) / np.sum(rows**2)


def gradient(net, start, data, client):
    """The gradient of the sum of losses over a client's samples, by name."""
    net.load_state_dict({name: torch.tensor(t) for name, t in start.items()})
    net.zero_grad()
    index = torch.as_tensor(data.client(client))
    nn.functional.cross_entropy(
        net(data.fetch(index, None)[0]), data.fetch(index, None)[1], reduction="sum"
    ).backward()
    return {name: p.grad.numpy() for name, p in net.named_parameters()}


@pytest.mark.parametrize(("k", "poisoned"), [(1, False), (2, True)])
def test_the_share_equals_its_definition(k, poisoned):
    """Gradients are taken at the broadcast model, so a client that diverges later counts."""
    data = random_federation()
    net = make_net()
    rows, rounds, _ = measured(GCShare(every=1), net, data, k=k, cohort_of=4, poisoned=poisoned)
    starts = [
        *(start for start, _ in rounds),
        {name: t.numpy() for name, t in net.state_dict().items()},
    ]
    other = make_net()
    names = ("0.weight", "2.weight")
    for row, (start, locals_), after in zip(rows, rounds, starts[1:], strict=True):
        grads = [gradient(other, start, data, client) for client in locals_]
        wanted = {
            f"gc/share_gradient/{name}": np.mean([share(g[name]) for g in grads]) for name in names
        }
        wanted |= {f"gc/share_update/{name}": share(after[name] - start[name]) for name in names}
        wanted |= {f"gc/share_model/{name}": share(start[name]) for name in names}
        assert row == pytest.approx(wanted, **EXACT)
    assert any(NAN_CLIENT in locals_ for _, locals_ in rounds)


def test_the_model_is_the_broadcast_one():
    """Clients start ahead of the server's own model here."""
    server = partial(torch.optim.SGD, lr=1.0, momentum=0.85)
    data = random_federation()
    net = make_net()
    run = {"methods": [LookAhead(0.85)], "server": server, "cohort_of": 4}
    rows, rounds, _ = measured(GCShare(every=1), net, data, **run)
    for row, (start, _) in zip(rows, rounds, strict=True):
        for name in ("0.weight", "2.weight"):
            expected = share(start[name])
            assert row[f"gc/share_model/{name}"] == pytest.approx(expected, **EXACT)


def test_the_share_is_zero_after_a_layer_norm():
    net = nn.Sequential(
        make_net()[0], nn.LayerNorm(make_net()[0].out_features), make_net()[2]
    ).double()
    rows, _, _ = measured(GCShare(every=1), net, random_federation(), cohort_of=4, rounds=1)
    assert rows[0]["gc/share_gradient/2.weight"] < 1e-25 < rows[0]["gc/share_gradient/0.weight"]
