import numpy as np
import pytest

from gcfed.data.sampling import DynamicPopulation, UniformSampler, cohort_size

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
    with pytest.raises(ValueError, match=words):
        sampler.validate(num_clients)


@pytest.mark.parametrize(
    ("per_round", "size"), [(1, 1), (7, 7), (0.05, 2), (0.001, 1), (0.99, 40), (0.5, 20)]
)
def test_a_share_of_all_clients_is_at_least_one(per_round, size):
    assert cohort_size(per_round, 40) == size
