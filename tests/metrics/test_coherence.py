"""gc/rho/*: how far the clients agree in the part of their updates that P removes."""

import numpy as np
import pytest
from harness import make_net, random_federation
from recording import EXACT, NAN_CLIENT, measured
from torch import nn

from gcfed.metrics.updates import Coherence


def expected(start, locals_):
    """The definition, computed client by client on whole tensors."""
    found = {}
    for name in (name for name, t in start.items() if t.ndim > 1):
        removed = []
        for w in locals_.values():
            delta = w[name] - start[name]
            mean = delta.mean(axis=tuple(range(1, delta.ndim)), keepdims=True)
            removed.append(np.broadcast_to(mean, delta.shape))
        found[f"gc/rho/{name}"] = np.sum(np.mean(removed, 0) ** 2) / np.mean(
            [np.sum(r**2) for r in removed]
        )
    return found


@pytest.mark.parametrize(("k", "poisoned"), [(1, False), (2, True)])
def test_rho_equals_its_definition(k, poisoned):
    rows, rounds, _ = measured(
        Coherence(), make_net(), random_federation(), k=k, cohort_of=4, poisoned=poisoned
    )
    for row, (start, locals_) in zip(rows, rounds, strict=True):
        finite = {
            client: w for client, w in locals_.items() if not (poisoned and client == NAN_CLIENT)
        }
        assert row == pytest.approx(expected(start, finite), **EXACT)
        assert all(0 <= rho <= 1 + 1e-9 for rho in row.values())


def test_a_client_agrees_with_itself():
    rows, _, _ = measured(Coherence(), make_net(), random_federation(), cohort_of=1, rounds=1)
    assert rows == [pytest.approx({"gc/rho/0.weight": 1, "gc/rho/2.weight": 1})]


class Upsampled(nn.Module):
    """Has a two-dimensional parameter that is no weight, and a weight with its outputs on the
    second axis.
    """

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(make_net()[0].weight[:1])
        self.up = nn.ConvTranspose1d(2, 2, 2)
        self.head = make_net()
        self.double()

    def forward(self, x):
        return self.head(self.up((x + self.offset).unflatten(1, (2, 3)))[:, :, :3].flatten(1))


def test_it_finds_the_weights_and_their_output_axis():
    rows, rounds, _ = measured(Coherence(), Upsampled(), random_federation(), cohort_of=4)
    for row, (start, locals_) in zip(rows, rounds, strict=True):
        both = [
            {k: t.swapaxes(0, 1) if k == "up.weight" else t for k, t in w.items()}
            for w in (start, *locals_.values())
        ]
        wanted = expected(both[0], dict(enumerate(both[1:])))
        assert row == pytest.approx(
            {name: rho for name, rho in wanted.items() if "offset" not in name}, **EXACT
        )
