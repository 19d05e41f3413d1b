"""A server step that is not finite changes neither the model nor the server optimizer, and the run
continues.
"""

import logging
from functools import partial

import pytest
import torch
from harness import Spy, make_net, sgd, train_rounds, weights

from gcfed.aggregators.coordinates import TrimmedMean
from gcfed.methods.momentum.lookahead import LookAhead
from gcfed.optim.fedopt import FedAdam


class Breaks(Spy):
    """Makes the server's second step overflow, although every upload is finite."""

    def __init__(self, where):
        self.where = where
        self.aggregated = []

    def send(self, upload, own, download):
        if (self.where, download.round_index) == ("sum", 1):
            upload.delta["0.bias"][:, 0] = 1.5e308  # the sum of two overflows

    def on_aggregate_end(self, update, round):
        self.aggregated.append(round.index)
        if round.index == 1:
            # 1e200² overflows
            value = {"sum": 0.0, "update": float("inf"), "moments": 1e200}[self.where]
            update["0.bias"][0] = value


MOMENTUM = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
ADAM = partial(FedAdam, lr=0.01)


@pytest.mark.parametrize(
    ("server", "where", "others"),
    [
        (MOMENTUM, "sum", []),
        (MOMENTUM, "update", []),
        (MOMENTUM, "update", [LookAhead(0.9)]),  # clients do not start at the model
        (ADAM, "moments", []),
    ],
)
def test_a_refused_step_changes_nothing(federation, server, where, others, caplog):
    net = make_net()
    method = Breaks(where)
    seen = []

    def on_round(round, row):
        state = [t.clone() for own in round.optimizer.state.values() for t in own.values()]
        seen.append((row["train/refused_steps"], weights(net).clone(), state))

    with caplog.at_level(logging.WARNING):
        # the mean would leave out numbers of that size
        rule = TrimmedMean(hostile=0.0) if where == "sum" else None
        train_rounds(
            net,
            federation,
            sgd(),
            rounds=3,
            methods=[*others, method],
            server=server,
            on_round=on_round,
            aggregator=rule,
        )
    (a, first, state), (b, second, kept), (c, third, _) = seen
    assert a == 0
    assert b == 1
    assert c == 0
    assert torch.equal(second, first)
    assert len(state) > 0
    assert all(torch.equal(x, y) for x, y in zip(kept, state, strict=True))
    assert not torch.equal(third, first)
    assert third.isfinite().all()
    assert "round 2: the mean update or the server's step was not finite" in caplog.text
    # methods see no update that overflows
    assert method.aggregated == ([0, 2] if where == "sum" else [0, 1, 2])
