"""MOON: the contrastive term against each client's own last model, which the server never sees."""

import pytest
import torch
import torch.nn.functional as F
from harness import train_rounds
from plain_clients import ROUNDS, SOLVER, Bytes, Net, federation, layers, plain_rounds

from gcfed.methods.moon import Moon


def cosine(a, b):
    norms = (a * a).sum(1).sqrt().clamp(min=1e-8) * (b * b).sum(1).sqrt().clamp(min=1e-8)
    return (a * b).sum(1) / norms


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (3.0, 0.2)])
def test_rounds_equal_an_independent_loop(k, sequences, mu, temperature):
    data = federation(sequences)
    seen = []

    def objective(w, start, client, x, y, previous):
        """As the paper's Algorithm 1, where a client without a previous model takes the broadcast one."""
        seen.append(previous is not None)
        _, z, logits = layers(w, x)
        z_global, z_previous = (layers(v, x)[1].flatten(1).detach() for v in (start, previous or start))
        near, far = (torch.exp(cosine(z.flatten(1), other) / temperature) for other in (z_global, z_previous))
        contrast = -torch.log(near / (near + far)).mean()
        return F.cross_entropy(logits.flatten(0, -2), y.flatten()) + mu * contrast

    expected = plain_rounds(data, objective)
    assert set(seen) == {False, True}
    got = train_rounds(Net(), data, SOLVER, rounds=ROUNDS, methods=[Moon(mu, temperature), Bytes()], k=k)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_strength_zero_and_first_rounds_are_fedavg_bit_for_bit():
    plain = train_rounds(Net(), federation(), SOLVER, rounds=2)
    got = train_rounds(Net(), federation(), SOLVER, rounds=2, methods=[Moon(mu=0.0)])
    assert torch.equal(got, plain)
    plain = train_rounds(Net(), federation(), SOLVER, rounds=1)
    got = train_rounds(Net(), federation(), SOLVER, rounds=1, methods=[Moon()])
    assert torch.equal(got, plain)
