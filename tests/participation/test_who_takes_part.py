"""Whole runs with faults, or with a changing population, equal plain loops."""

import numpy as np
import pytest
from plain import SEED, Plain, check, draw

from gcfed.participation.sampling import DynamicPopulation


class Faulty(Plain):
    """The first clients to finish count. Clients that drop out never finish."""

    n = 10
    cohort = 3
    dropout = 0.4
    stragglers = 0.6
    deadline = 5
    extra = 3
    poisson = False
    overrides = (
        *(
            f"participation.faults.{key}={value}"
            for key, value in {
                "dropout": dropout,
                "stragglers": stragglers,
                "deadline": deadline,
                "extra": extra,
            }.items()
        ),
        "participation.per_round=3",
        "client.stack=2",
        "rounds=5",
    )

    def drawn(self, t):
        rng = draw("cohort", t)
        many = self.cohort + self.extra
        many = rng.binomial(self.n, many / self.n) if self.poisson else many
        return np.sort(rng.choice(self.n, many, replace=False, shuffle=False)).tolist()

    def came(self, t, drawn):
        done = {}
        times = {}
        for k in drawn:
            planned = sum(1 for _ in self.batches(k, t))
            done[k] = min(planned, self.deadline or planned)
            slow, part = draw("straggler", t, k).random(2)
            if slow < self.stragglers:
                done[k] = min(done[k], 1 + int(part * planned))
            fate = draw("fault", t, k)
            if fate.random() >= self.dropout:
                times[k] = fate.exponential() * done[k]
        self.planned = {k: sum(1 for _ in self.batches(k, t)) for k in drawn}
        return {k: done[k] for k in sorted(sorted(times, key=times.get)[: self.cohort])}

    def sent(self, t, deltas):
        model = sum(p.numel() for p in self.net.parameters()) * 8
        self.row |= {
            "train/dropped_clients": len(self.planned) - len(deltas),
            "comm/up_bytes": len(deltas) * model,
            "train/stragglers": sum(self.steps[k] < self.planned[k] for k in deltas),
            "comm/down_bytes": len(self.planned) * model,
        }


class FaultyPoisson(Faulty):
    last = "drop"
    deadline = None
    dropout = 0.0
    extra = 2
    poisson = True
    overrides = (
        "client.last_batch=drop",
        "participation.faults.stragglers=0.6",
        "participation.faults.extra=2",
        "participation.per_round=3",
        "participation=poisson",
        "rounds=9",
    )


class Changing(Plain):
    """A client that leaves is replaced by one that is not live.

    These are drawn by their ranks among sorted ids.
    """

    n = 9
    live = 6
    every = 1
    replace = 0.7
    cohort = 4
    last = "wrap"
    overrides = (
        "client.last_batch=wrap",
        "participation=dynamic",
        "participation.per_round=4",
        "participation.sampler.live=6",
        "participation.sampler.every=1",
        "participation.sampler.replace_probability=0.7",
        "rounds=5",
    )

    def drawn(self, t):
        return population(self.n, self.live, self.every, self.replace, self.cohort, t)


def population(n, live, every, replace, cohort, t):
    ids = sorted(draw("population", 0).choice(n, live, replace=False, shuffle=False).tolist())
    for stage in range(1, t // every + 1):
        rng = draw("population", stage)
        waiting = [k for k in range(n) if k not in ids]
        leaving = rng.permutation([i for i, u in enumerate(rng.random(live)) if u < replace])[
            : n - live
        ].tolist()
        ranks = rng.choice(n - live, len(leaving), replace=False).tolist() if leaving else []
        gone = [ids[i] for i in leaving]
        ids = sorted([k for k in ids if k not in gone] + [waiting[rank] for rank in ranks])
    return [
        ids[i]
        for i in sorted(
            draw("cohort", t).choice(live, cohort, replace=False, shuffle=False).tolist()
        )
    ]


@pytest.mark.parametrize("case", [Faulty, FaultyPoisson, Changing])
def test_a_run_equals_the_plain_loop(config, tmp_path, case):
    check(case, config, tmp_path)


@pytest.mark.parametrize(
    ("n", "live", "every", "replace"),
    [
        (30, 10, 3, 0.5),
        (11, 10, 2, 1.0),
        (10, 10, 1, 0.5),
    ],
)
def test_a_population_equals_the_plain_one(n, live, every, replace):
    sampler = DynamicPopulation(4, live=live, every=every, replace_probability=replace)
    for t in range(25):
        assert sampler(t, n, SEED).tolist() == population(n, live, every, replace, 4, t)
