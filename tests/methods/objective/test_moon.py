"""MOON: the contrastive term uses each client's own last model, which the server never sees."""

import pytest
import torch
import torch.nn.functional as F
from plain_clients import check, federation, layers

from gcfed.methods.objective.moon import Moon


def cosine(a, b):
    norms = (a * a).sum(1).sqrt().clamp(min=1e-8) * (b * b).sum(1).sqrt().clamp(min=1e-8)
    return (a * b).sum(1) / norms


@pytest.mark.parametrize("sequences", [False, True])
def test_rounds_equal_an_independent_loop(sequences):
    mu = 3.0
    temperature = 0.2
    seen = []

    def objective(w, start, client, x, y, previous):
        """The paper's Algorithm 1. A client without a previous model uses the broadcast model."""
        seen.append(previous is not None)
        _, z, logits = layers(w, x)
        z_global, z_previous = (
            layers(v, x)[1].flatten(1).detach() for v in (start, previous or start)
        )
        near, far = (
            torch.exp(cosine(z.flatten(1), other) / temperature) for other in (z_global, z_previous)
        )
        contrast = -torch.log(near / (near + far)).mean()
        return F.cross_entropy(logits.flatten(0, -2), y.flatten()) + mu * contrast

    check(Moon(mu, temperature), federation(sequences), objective, rounds=4)
    assert set(seen) == {False, True}
