import numpy as np
import pytest
import torch
from conftest import refuses
from harness import assert_near, train_rounds

from gcfed.aggregators.coordinates import Median
from gcfed.assemble import build_loop
from gcfed.participation.sampling import (
    DynamicPopulation,
    PoissonSampler,
    UniformSampler,
    number_of_clients,
)

SAMPLERS = [UniformSampler(5), DynamicPopulation(5, live=20, every=10)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_client_is_equally_likely(sampler):
    rounds = 1000
    cohorts = np.concatenate([sampler(0, 40, seed) for seed in range(rounds)])
    expected = rounds * 5 / 40
    chi2 = ((np.bincount(cohorts, minlength=40) - expected) ** 2 / expected).sum()
    assert chi2 < 39 + 5 * np.sqrt(2 * 39)


def test_a_huge_population_is_never_listed():
    cohort = UniformSampler(100)(3, 10**15, 1)  # a list would need 8 PB
    assert len(np.unique(cohort)) == 100
    assert len(DynamicPopulation(10)(1000, 10**15, 1)) == 10


@pytest.mark.parametrize(
    ("sampler", "num_clients", "words"),
    [
        (UniformSampler(5), 4, "participation.per_round=5 exceeds participation.num_clients=4"),
        (
            DynamicPopulation(5),
            100,
            "participation.sampler.live=250 exceeds participation.num_clients=100",
        ),
        (
            DynamicPopulation(5, live=4),
            100,
            "participation.per_round=5 exceeds participation.sampler.live=4",
        ),
    ],
)
def test_impossible_settings_are_refused_by_name(sampler, num_clients, words):
    with refuses(words):
        sampler.validate(num_clients)


@pytest.mark.parametrize(
    ("per_round", "size"), [(1, 1), (7, 7), (0.05, 2), (0.001, 1), (0.99, 40), (0.5, 20)]
)
def test_a_share_of_all_clients_is_at_least_one(per_round, size):
    assert number_of_clients(per_round, 40, "participation.per_round") == size


@pytest.mark.parametrize("per_round", [1.0, 0.0, 0, -1, 2.5, True, "all", None])
def test_a_number_that_is_no_number_of_clients_is_refused_with_that_of_all(per_round):
    """1.0 could mean one client, or all of them."""
    with refuses(r"neither .* set participation.per_round=40 for all"):
        number_of_clients(per_round, 40, "participation.per_round")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("participation.per_round=1.0", "participation.per_round"),
        ("participation.sampler.concurrency=1.0", "participation.sampler.concurrency"),
    ],
)
def test_the_refusal_of_a_number_of_clients_names_its_key(config, word, key):
    with refuses(f"^{key}=1.0 is neither .* set {key}=20 for all clients"):
        build_loop(config("algorithm=fedbuff", word), 20)


def test_a_buffered_run_takes_shares_of_all_clients(config):
    loop = build_loop(config("algorithm=fedbuff", "participation.per_round=0.25"), 20)
    assert loop.sampler.per_round == 5
    assert loop.sampler.concurrency == 5


@pytest.mark.parametrize("sampler", [*SAMPLERS, PoissonSampler(1), PoissonSampler(400)])
def test_no_round_has_more_clients_than_the_sampler_says(sampler):
    sizes = [len(sampler(t, 5000, 7)) for t in range(300)]
    assert max(sizes) <= sampler.most
    if isinstance(sampler, PoissonSampler):
        assert max(sizes) > sampler.per_round


def test_only_a_rule_of_participation_is_a_sampler(config):
    words = ("participation.sampler._target_=builtins.dict",)
    with refuses("^participation.sampler: dict is no sampler: make it a subclass of gcfed"):
        build_loop(config(*words), 100)


class Own(UniformSampler):
    """Draws what it is given."""

    def __call__(self, round, num_clients, seed):
        return self.drawn


def own(drawn):
    sampler = Own(3)
    object.__setattr__(sampler, "drawn", drawn)
    return sampler


@pytest.mark.parametrize("drawn", [[1, 3, 0], np.array([3, 1, 0]), torch.tensor([3, 0, 1])])
@pytest.mark.parametrize("k", [1, 2])
def test_a_users_sampler_may_draw_in_any_order(drawn, k):
    """A rule that needs the whole cohort has a row for each client."""
    expected = train_rounds(sampler=own(np.array([0, 1, 3])), rounds=1, aggregator=Median())
    found = train_rounds(sampler=own(drawn), rounds=1, aggregator=Median(), k=k)
    assert_near(found, expected, 1e-14)


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        ([0, 1, 1], r"has drawn a client twice: \[0, 1, 1\]"),
        ([0, 1, 5], r"must draw ids from 0 to 4, and has drawn \[0, 1, 5\]"),
        ([-1, 0, 1], "must draw ids from 0 to 4"),
        ([0.0, 1.0, 2.0], "must draw ids from 0 to 4"),
        ([True, False, True, False, True], "must draw ids from 0 to 4"),
        (2, "must draw ids from 0 to 4"),
    ],
)
def test_a_users_sampler_draws_distinct_clients(drawn, words):
    with refuses(f"participation.sampler=Own {words}"):
        train_rounds(sampler=own(drawn), rounds=1)
