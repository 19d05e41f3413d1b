"""Robust rules equal NumPy definitions for any stacks and processes, and limit the effect of a
hostile upload.
"""

from math import ceil

import numpy as np
import pytest
import torch
from harness import (
    PLAIN_SERVER,
    Cohorts,
    assert_near,
    make_net,
    make_upload,
    random_federation,
    server_of,
    sgd,
    train_rounds,
    trainer_of,
    weights,
)
from torch import nn

from gcfed.aggregators.coordinates import Median, TrimmedMean
from gcfed.aggregators.geometric_median import GeometricMedian
from gcfed.aggregators.krum import Bulyan, Krum, MultiKrum
from gcfed.aggregators.mean import MeanAggregator
from gcfed.aggregators.norm_clip import MedianClip, NormClip
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.parts import ServerPart
from gcfed.federated.protocol.rounds import Round
from gcfed.federated.state.store import ClientStores
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.personal.local_norm import LocalNorm


def krum_scores(x, f):
    n = len(x)
    return [
        sorted(((x[i] - x[j]) ** 2).sum() for j in range(n) if j != i)[: max(1, n - f - 2)]
        for i in range(n)
    ]


def multi_krum(x, f):
    return x[np.argsort([sum(s) for s in krum_scores(x, f)], kind="stable")[: len(x) - f]].mean(0)


def krum(x, f):
    return x[np.argmin([sum(s) for s in krum_scores(x, f)])]


def bulyan(x, f):
    n = len(x)
    left = list(range(len(x)))
    chosen = []
    while len(chosen) < n - 2 * f:
        best = left[int(np.argmin([sum(s) for s in krum_scores(x[left], f)]))]
        chosen.append(best)
        left.remove(best)
    x = x[chosen]
    near = np.argsort(np.abs(x - np.median(x, 0)), 0, kind="stable")[: n - 4 * f]
    return np.take_along_axis(x, near, 0).mean(0)


def trimmed_mean(x, f):
    return np.sort(x, 0)[f : len(x) - f].mean(0)


def geometric_median(x, f):
    point = np.median(x, 0)
    for _ in range(10):
        weights = 1 / np.maximum(1e-6, np.linalg.norm(x - point, axis=1))
        point = (weights[:, None] * x).sum(0) / weights.sum()
    return point


def norm_clip(x, f):
    return np.mean([row * min(1, 2.0 / np.linalg.norm(row)) for row in x], 0)


def median_clip(x, f):
    norms = np.linalg.norm(x, axis=1)
    return np.mean(
        [row * min(1, 1.5 * np.median(norms) / norm) for row, norm in zip(x, norms, strict=True)], 0
    )


RULES = {
    "median": (Median, lambda x, f: np.median(x, 0)),
    "trimmed_mean": (lambda: TrimmedMean(0.2), trimmed_mean),
    "krum": (lambda: Krum(0.2), krum),
    "multi_krum": (lambda: MultiKrum(0.2), multi_krum),
    "bulyan": (lambda: Bulyan(0.1), bulyan),
    "geometric_median": (GeometricMedian, geometric_median),
    "norm_clip": (lambda: NormClip(2.0), norm_clip),
    "median_clip": (lambda: MedianClip(1.5), median_clip),
}


def aggregate(rule, delta, stacks):
    """The rule's update of n clients, whose uploads arrive in stacks of these rows."""
    n = len(next(iter(delta.values())))
    start = {name: t[0] for name, t in delta.items()}
    round = Round(0, 1, np.arange(n) * 3, 3 * n, start, lr=0.1, versions=np.zeros(n, int))
    total = rule.new_sum(round)
    for rows in stacks:
        upload = make_upload(
            {name: t[rows].clone() for name, t in delta.items()}, np.ones(len(rows))
        )
        upload.clients = np.array(rows) * 3
        total.add(upload)
    update = total.reduce(start)
    assert {name: t.shape for name, t in update.items()} == {
        name: t.shape for name, t in start.items()
    }
    return torch.cat([update[name].flatten() for name in sorted(update)])


def cohort(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(n, 3, 2, generator=g).double(),
        "b": torch.randn(n, generator=g).double(),
    }


def matrix(delta):
    return torch.cat([delta["b"][:, None], delta["w"].flatten(1)], 1).numpy()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 7, 10])
def test_a_rule_equals_its_definition_for_any_stacks(name, n):
    make, definition = RULES[name]
    delta = cohort(n)
    rule = make()
    least = {"bulyan": (4, 3), "krum": (2, 3), "multi_krum": (2, 3)}.get(name, (2, 1))
    f = max(0, min(ceil((0.1 if name == "bulyan" else 0.2) * n - 1e-9), (n - least[1]) // least[0]))
    expected = torch.from_numpy(definition(matrix(delta), f))
    whole = aggregate(rule, delta, [list(range(n))])
    assert_near(whole, expected, 1e-12)
    # a rule keeps nothing from a round
    again = aggregate(rule, delta, [[i] for i in reversed(range(n))])
    assert_near(again, whole, 1e-15)


@pytest.mark.parametrize("name", RULES)
def test_an_upload_that_is_not_finite_is_left_out(name):
    delta = cohort(9)
    rule = RULES[name][0]()
    delta["w"][2, 0, 1] = float("nan")
    honest = [i for i in range(9) if i != 2]
    expected = aggregate(rule, {k: t[honest] for k, t in delta.items()}, [list(range(8))])
    found = aggregate(rule, delta, [[0, 1, 2], [3, 4, 5, 6, 7, 8]])
    assert_near(found, expected, 1e-15)
    delta["w"][:] = float("nan")
    assert aggregate(rule, delta, [list(range(9))]).eq(0).all()


@pytest.mark.parametrize("name", RULES)
def test_one_hostile_client_moves_the_mean_but_no_robust_rule(name):
    delta = {key: t.float() for key, t in cohort(10).items()}
    delta["w"][0, 0, 0] = 3e38
    update = aggregate(RULES[name][0](), delta, [[0, 1], list(range(2, 10))])
    assert update.norm() < 5
    assert aggregate(MeanAggregator(), delta, [list(range(10))]).norm() > 1e8


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("local", [False, True])
def test_the_rule_reduces_running_statistics_separately(name, local):
    """They do not influence how the rule treats the updates.

    Hostile statistics are filtered, too.
    """
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    make, definition = RULES[name]
    rule = make()
    loop = FederatedLoop(sampler=Cohorts(10), solver=sgd(), aggregator=rule, rounds=1, seed=1)
    data = random_federation(sizes=(4,) * 10, features=2, classes=3, dtype=torch.float32)
    loop.bind([LocalNorm()] * local, data, FederatedModule(net, PLAIN_SERVER))
    g = torch.Generator().manual_seed(2)
    sent = {n: t for n, t in net.state_dict().items() if t.is_floating_point()}
    apart = {n for n in sent if "running" in n or (local and n.startswith("1."))}
    delta = {
        n: torch.randn(10, *t.shape, generator=g).double() * (100 if n in apart else 1)
        for n, t in sent.items()
    }
    update = aggregate(rule, delta, [[0, 1, 2], list(range(3, 10))])
    result = dict(
        zip(sorted(delta), update.split([sent[n].numel() for n in sorted(delta)]), strict=True)
    )
    for part in (apart, set(delta) - apart):
        rows = torch.cat([delta[n].flatten(1) for n in sorted(part)], 1).numpy()
        expected = torch.from_numpy(definition(rows, ceil(0.1 * 10) if name == "bulyan" else 2))
        assert_near(torch.cat([result[n] for n in sorted(part)]), expected, 1e-12)


@pytest.mark.parametrize(
    ("name", "cohort_of", "others"),
    [
        ("krum", 7, [(2, 1), (2, 2)]),
        ("norm_clip", 7, [(2, 2)]),
        ("median", 1, [(1, 2)]),
    ],
)
def test_stacks_and_two_processes_agree_through_the_loop(name, cohort_of, others):
    """In the third case, one of the two processes has no client."""
    data = random_federation(sizes=(7, 12, 5, 9, 1, 6, 8, 4, 11, 3))
    first, *runs = [
        train_rounds(
            make_net(),
            data,
            sgd(),
            rounds=1,
            cohort_of=cohort_of,
            aggregator=RULES[name][0](),
            k=k,
            world=world,
        )
        for k, world in ((1, 1), *others)
    ]
    for other in runs:
        assert_near(other, first, 1e-9)


class FailsOnce(ServerPart):
    """Raises an error at the third upload of the run."""

    def __init__(self):
        self.num_uploads = 0

    def on_receive(self, upload, round):
        self.num_uploads += 1
        if self.num_uploads == 3:
            raise RuntimeError("the third upload")


@pytest.mark.parametrize("name", ["mean", "norm_clip", "median"])
def test_a_round_after_an_error_counts_no_upload_twice(name):
    """In a notebook one calls ``fit`` again after an error. Before, the sum kept two uploads."""
    rules = RULES | {"mean": (MeanAggregator, None)}
    expected = train_rounds(rounds=1, aggregator=rules[name][0]())
    net = make_net()
    data = random_federation()
    data.rounds = 1
    module = FederatedModule(net, PLAIN_SERVER)
    loop = FederatedLoop(
        sampler=Cohorts(3), solver=sgd(), aggregator=rules[name][0](), rounds=1, seed=5
    )
    fails = FailsOnce()

    def fit():
        trainer_of([loop, fails], rounds=1).fit(module, datamodule=data)

    module.test = lambda watchers: {}
    with pytest.raises(RuntimeError, match="the third upload"):
        fit()
    fit()
    assert fails.num_uploads == 6
    assert torch.equal(weights(net), expected)


class Counting(nn.Linear):
    """Counts its calls, in a buffer that travels only because training changes it."""

    def __init__(self):
        super().__init__(2, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("rule", [Krum(), NormClip(0.1)])
def test_a_counter_that_the_probe_finds_is_no_step_of_an_optimizer(rule):
    """It would outweigh all updates in the distances between clients."""
    loop = FederatedLoop(sampler=Cohorts(10), solver=sgd(), aggregator=rule, rounds=1, seed=1)
    data = random_federation(sizes=(4,) * 10, features=2, classes=3, dtype=torch.float32)
    loop.bind([], data, FederatedModule(Counting(), PLAIN_SERVER))
    assert rule.no_steps == {"calls"}


@pytest.mark.parametrize(
    ("rule", "per_round", "message"),
    [
        (Bulyan(0.2), 10, "Bulyan needs 4·2 [+] 3"),
        (TrimmedMean(0.49), 2, "2·1"),
    ],
)
def test_a_cohort_that_is_too_small_is_refused(rule, per_round, message):
    loop = FederatedLoop(
        sampler=Cohorts(per_round), solver=sgd(), aggregator=rule, rounds=1, seed=1
    )
    module = FederatedModule(make_net(), PLAIN_SERVER)
    with pytest.raises(
        ValueError, match=rf"aggregator\.hostile=.*participation\.per_round={per_round}.*{message}"
    ):
        loop.bind([], random_federation(sizes=(3,) * 12), module)


@pytest.mark.parametrize(
    ("rule", "definition"),
    [
        (
            NormClip(0.1),
            lambda x: np.mean([row * min(1, 0.1 / np.linalg.norm(row)) for row in x], 0),
        ),
        (MultiKrum(0.2), lambda x: multi_krum(x, 1)),
        (MeanAggregator(), lambda x: x.mean(0)),
    ],
)
def test_extra_tensors_are_reduced_by_the_same_rule(rule, definition):
    method = Scaffold()
    stores = ClientStores()
    train_rounds(
        rounds=1,
        cohort_of=5,
        methods=[method],
        aggregator=rule,
        stores=stores,
    )
    own = stores.read("scaffold", np.arange(5), server_of(method).shared)
    rows = torch.cat([t.flatten(1) for t in own.values()], 1).numpy()
    reduced = torch.cat([t.flatten() for t in server_of(method).shared.values()])
    assert_near(reduced, torch.from_numpy(definition(rows)), 1e-12)


@pytest.mark.parametrize("name", ["geometric_median", "krum", "multi_krum", "bulyan"])
def test_distances_do_not_depend_on_a_common_offset(name):
    """For 40 clients, products of vectors would be faster, but their rounding errors exceed short
    distances.
    """
    near = cohort(40)
    far = {key: t + 1e6 for key, t in near.items()}
    here, there = (aggregate(RULES[name][0](), delta, [list(range(40))]) for delta in (near, far))
    assert_near(there - 1e6, here, 1e-7)
