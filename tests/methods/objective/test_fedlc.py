"""FedLC: the calibrated cross-entropy excludes the classes that a client lacks."""

import pytest
import torch
from plain_clients import check, federation, layers

from gcfed.methods.objective.fedlc import FedLC


@pytest.mark.parametrize("sequences", [False, True])
def test_rounds_equal_an_independent_loop(sequences):
    data = federation(sequences)
    tau = 1.0
    exponent = 0.5

    def objective(w, start, client, x, y, previous):
        counts = [int((data.y[data.clients[client]] == c).sum()) for c in range(4)]
        assert 0 in counts  # every client lacks classes
        losses = []
        for logits, label in zip(
            layers(w, x)[-1].flatten(0, -2), y.flatten().tolist(), strict=True
        ):
            if label >= 0:
                margins = [tau * n**-exponent if n else None for n in counts]
                there = {
                    c: torch.exp(logits[c] - m) for c, m in enumerate(margins) if m is not None
                }
                losses.append(-torch.log(there[label] / sum(there.values())))
        return sum(losses) / len(losses)

    check(FedLC(tau, exponent), data, objective)
