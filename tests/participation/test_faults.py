"""Dropouts, stragglers, deadlines and over-selection: their effect on rounds.
test_who_takes_part.py has the draws.
"""

import numpy as np
import pytest
import torch
from harness import assert_near, make_net, random_federation, sgd, train_rounds, weights

from gcfed.aggregators.coordinates import Median
from gcfed.assemble import assemble
from gcfed.participation.faults import Faults
from gcfed.utils.rng import generator

SIZES = (7, 12, 5, 9, 1, 20, 8)


def run(faults, cohort_of=5, rounds=2, **kwargs):
    rows = []
    net = train_rounds(
        make_net(),
        random_federation(sizes=SIZES),
        sgd(),
        rounds=rounds,
        cohort_of=cohort_of,
        faults=Faults(**faults),
        on_round=lambda round, row: rows.append(row | {"answered": round.answered.tolist()}),
        **kwargs,
    )
    return net, rows


def test_stacks_and_two_processes_agree():
    faults = {"dropout": 0.2, "stragglers": 0.7, "deadline": 5, "extra": 2}
    one, rows = run(faults)
    for k, world in ((3, 1), (2, 2)):
        net, other = run(faults, k=k, world=world)
        assert_near(net, one, 1e-9)
        for a, b in zip(rows, other, strict=True):
            same = (
                "answered",
                "train/steps",
                "train/samples",
                "train/stragglers",
                "train/dropped_clients",
            )
            assert [a[key] for key in same] == [b[key] for key in same]
    assert sum(row["train/dropped_clients"] + row["train/stragglers"] for row in rows) > 0


def test_stragglers_keep_to_the_deadline():
    """A straggler's random number of steps counts only if it is below the deadline."""
    planned = np.full(200, 10)
    clients = np.arange(200)
    deadline = 4
    steps = Faults(stragglers=0.5, deadline=deadline).steps(planned, clients, round_index=2, seed=7)
    expected = []
    for client in clients.tolist():
        is_slow, share = generator(7, "straggler", 2, client).random(2)
        part = 1 + int(share * 10) if is_slow < 0.5 else 10
        expected.append(min(part, deadline))
    assert steps.tolist() == expected
    assert {*expected} == {1, 2, 3, 4}


def test_no_more_than_all_clients_can_be_drawn(config):
    words = ("participation.per_round=18", "participation.faults.extra=7")
    with pytest.raises(ValueError, match=r"per_round=25 exceeds participation\.num_clients=20"):
        assemble(config(*words))


@pytest.mark.parametrize(("world", "rule"), [(2, None), (1, Median())])
def test_a_round_in_which_all_clients_drop_out_does_not_change_the_model(world, rule):
    net, rows = run({"dropout": 0.999999999}, world=world, aggregator=rule)
    assert torch.equal(net, weights(make_net()))
    assert [
        (row["train/clients"], row["train/dropped_clients"], row["train/steps"]) for row in rows
    ] == [(0, 5, 0)] * 2
    assert not any("train/loss" in row for row in rows)  # an empty cell, and not NaN
