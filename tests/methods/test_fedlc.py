"""FedLC: the calibrated cross-entropy, without the classes that a client lacks."""

import pytest
import torch
from harness import train_rounds
from plain_clients import ROUNDS, SOLVER, Bytes, Net, federation, layers, plain_rounds

from gcfed.methods.fedlc import FedLC


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize(("tau", "exponent"), [(0.1, 0.25), (1.0, 0.5)])
def test_rounds_equal_an_independent_loop(k, sequences, tau, exponent):
    data = federation(sequences)

    def objective(w, start, client, x, y, previous):
        labels = data.y[data.clients[client]]
        counts = [int((labels == c).sum()) for c in range(4)]
        assert 0 in counts  # every client lacks classes
        losses = []
        for logits, label in zip(layers(w, x)[-1].flatten(0, -2), y.flatten().tolist(), strict=True):
            if label >= 0:
                margins = [tau * n**-exponent if n else None for n in counts]
                there = {c: torch.exp(logits[c] - m) for c, m in enumerate(margins) if m is not None}
                losses.append(-torch.log(there[label] / sum(there.values())))
        return sum(losses) / len(losses)

    expected = plain_rounds(data, objective)
    got = train_rounds(Net(), data, SOLVER, rounds=ROUNDS, methods=[FedLC(tau, exponent), Bytes()], k=k)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_strength_zero_is_fedavg_bit_for_bit():
    plain = train_rounds(Net(), federation(), SOLVER, rounds=2)
    got = train_rounds(Net(), federation(), SOLVER, rounds=2, methods=[FedLC(tau=0.0)])
    assert torch.equal(got, plain)


def test_equal_counts_change_nothing():
    """The same margin for every class cancels in the softmax."""
    data = federation()
    data.class_counts = lambda ids: torch.full((len(ids), 4), 9).numpy()
    plain = train_rounds(Net(), data, SOLVER, rounds=2)
    got = train_rounds(Net(), data, SOLVER, rounds=2, methods=[FedLC(tau=1.0)])
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-12)
