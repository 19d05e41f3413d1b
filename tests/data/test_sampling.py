import itertools

import numpy as np
import pytest

from gcfed.data.sampling import DynamicPopulation, UniformSampler, cohort_size

SAMPLERS = [UniformSampler(5), DynamicPopulation(5, live=20, every=10)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_cohort_is_sorted_distinct_and_a_pure_function(sampler):
    for round in (0, 7, 35):
        cohort = sampler(round, 100, 1)
        assert (cohort.dtype, cohort.shape) == (np.int64, (5,))
        assert (np.diff([-1, *cohort, 100]) > 0).all()
        np.testing.assert_array_equal(cohort, sampler(round, 100, 1))
    cohorts = {tuple(sampler(round, 100, seed)) for round in range(10) for seed in (1, 2)}
    assert len(cohorts) == 20


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


def test_the_live_set_changes_only_between_stages_and_only_by_new_clients():
    sampler = DynamicPopulation(5, live=250, every=100)
    stages = [sampler.live_clients(100 * s, 1000, 1) for s in range(10)]
    np.testing.assert_array_equal(stages[3], sampler.live_clients(399, 1000, 1))
    stayed = []
    for before, after in itertools.pairwise(stages):
        assert len(np.unique(after)) == 250
        stayed.append(np.isin(after, before).mean())
    assert abs(np.mean(stayed) - 0.5) < 5 * 0.5 / np.sqrt(9 * 250)
    for round in (0, 99, 100, 950):
        assert np.isin(sampler(round, 1000, 1), sampler.live_clients(round, 1000, 1)).all()


def test_the_live_set_in_extreme_cases():
    sampler = DynamicPopulation(5, live=20, every=1, replace_probability=1)
    assert not np.isin(sampler.live_clients(1, 40, 1), sampler.live_clients(0, 40, 1)).any()
    np.testing.assert_array_equal(sampler.live_clients(9, 20, 1), np.arange(20))  # all clients are live
    before, after = (set(sampler.live_clients(round, 21, 1).tolist()) for round in (0, 1))
    assert set(range(21)) - before == after - before  # the only other client joins


@pytest.mark.parametrize(
    ("sampler", "num_clients", "words"),
    [
        (UniformSampler(5), 4, "participation.per_round=5 exceeds participation.num_clients=4"),
        (DynamicPopulation(5), 100, "participation.sampler.live=250 exceeds participation.num_clients=100"),
        (DynamicPopulation(5, live=4), 100, "participation.per_round=5 exceeds participation.sampler.live=4"),
    ],
)
def test_impossible_settings_are_refused_by_name(sampler, num_clients, words):
    with pytest.raises(ValueError, match=words):
        sampler.validate(num_clients)


@pytest.mark.parametrize(("per_round", "size"), [(1, 1), (7, 7), (0.05, 2), (0.001, 1), (0.99, 40), (0.5, 20)])
def test_a_share_of_all_clients_is_at_least_one(per_round, size):
    assert cohort_size(per_round, 40) == size
