"""Dropouts, stragglers, deadlines and over-selection: their rates and their effect on rounds."""

import numpy as np
import pytest
import torch
from harness import make_net, random_federation, sgd, train_rounds, weights

from gcfed.aggregators.coordinates import Median
from gcfed.assemble import assemble
from gcfed.data.faults import Faults

SIZES = (7, 12, 5, 9, 1, 20, 8)
PLANNED = np.array([4, 6, 4, 6, 2, 10, 4])  # the steps of two epochs in batches of four


def run(faults, cohort_of=5, rounds=4, **kwargs):
    rows = []
    net = train_rounds(
        make_net(), random_federation(sizes=SIZES), sgd(), rounds=rounds, cohort_of=cohort_of, faults=Faults(**faults),
        on_round=lambda round, row: rows.append(row | {"cohort": round.cohort.tolist()}), **kwargs,
    )  # fmt: skip
    return net, rows


@pytest.mark.parametrize("faults", [
    {"deadline": 3}, {"dropout": 0.2, "stragglers": 0.7, "deadline": 5, "extra": 2},
])  # fmt: skip
def test_stacks_and_two_processes_agree(faults):
    one, rows = run(faults)
    for k, world in ((3, 1), (2, 2)):
        net, other = run(faults, k=k, world=world)
        torch.testing.assert_close(net, one, rtol=0, atol=1e-9)
        for a, b in zip(rows, other, strict=True):
            same = ("cohort", "train/steps", "train/samples", "train/stragglers", "train/dropped_clients")
            assert [a[key] for key in same] == [b[key] for key in same]
    assert sum(row["train/dropped_clients"] + row["train/stragglers"] for row in rows) > 0


def test_no_more_than_all_clients_can_be_drawn(config):
    words = ("participation.per_round=18", "participation.faults.extra=7")
    with pytest.raises(ValueError, match=r"per_round=25 exceeds participation\.num_clients=20"):
        assemble(config(*words))


def test_a_deadline_is_a_number_of_steps():
    _, rows = run({"deadline": 3}, cohort_of=7, rounds=1)
    assert rows[0]["train/steps"] == np.minimum(PLANNED, 3).sum()
    assert rows[0]["train/stragglers"] == 6


@pytest.mark.parametrize(("world", "rule"), [(2, None), (1, Median())])
def test_a_round_in_which_all_clients_drop_out_does_not_change_the_model(world, rule):
    net, rows = run({"dropout": 0.999999999}, world=world, aggregator=rule)
    assert torch.equal(net, weights(make_net()))
    assert [(row["train/clients"], row["train/dropped_clients"], row["train/steps"]) for row in rows] == [(0, 5, 0)] * 4
    assert not any("train/loss" in row for row in rows)  # an empty cell, and not NaN


def test_draws_have_their_rates_and_depend_only_on_seed_round_and_client():
    clients, planned = np.arange(4000), np.full(4000, 10)
    faults = Faults(dropout=0.3, stragglers=0.5)
    assert len(faults.survivors(clients, planned, 3, 1)) == pytest.approx(2800, abs=120)
    steps = faults.steps(planned, clients, 3, 1)
    counts = np.bincount(steps, minlength=11)
    assert counts[0] == 0
    assert counts[1:10] == pytest.approx(200, abs=60)  # half of them draw 1 … 10 steps uniformly
    assert faults.steps(planned[5:9], clients[5:9], 3, 1).tolist() == steps[5:9].tolist()
    assert not np.array_equal(faults.steps(planned, clients, 4, 1), steps)
    few = faults.survivors(clients[:50], planned[:50], 3, 1)
    assert set(few) == set(faults.survivors(clients, planned, 3, 1)) & set(range(50))


def test_with_extra_clients_the_first_to_finish_count():
    drawn, steps = np.arange(0, 60, 2), np.array([1] * 15 + [100] * 15)
    came = np.concatenate([Faults(extra=10).survivors(drawn, steps, t, 1) for t in range(20)])
    assert len(came) == 20 * 20
    assert (came < 30).mean() > 0.7  # nearly all short clients are in time
    assert Faults(extra=10, dropout=0.999999999).survivors(drawn, steps, 0, 1).tolist() == []
    assert Faults().survivors(drawn, steps, 0, 1) is drawn
