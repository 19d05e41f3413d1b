"""Differential privacy: the noise, ε compared with other accountants, and settings that would break
the guarantee.
"""

import json
import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from types import SimpleNamespace

import harness
import numpy as np
import pytest
import torch
from conftest import TWO, needs, read_rows, refuses
from harness import (
    final_weights,
    join_run,
    make_net,
    make_received,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
)

from gcfed.aggregators.coordinates import Median
from gcfed.aggregators.mean import MeanAggregator
from gcfed.attacks.byzantine import Scale
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.parts import ClientPart, Order, ServerPart
from gcfed.federated.parts.refusals import validate_parts
from gcfed.methods.centralization import GlobalGC
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.momentum.lookahead import LookAhead
from gcfed.methods.upload import client_dp
from gcfed.methods.upload.client_dp import ClientDP
from gcfed.methods.upload.clip_update import ClipUpdate
from gcfed.methods.upload.quantization import Quantization
from gcfed.metrics.updates import Drift
from gcfed.models.mlp import MLP
from gcfed.participation.faults import Faults
from gcfed.participation.sampling import PoissonSampler, UniformSampler
from gcfed.run import train
from gcfed.utils.rng import torch_seed

pytestmark = needs("opacus")


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    """Draws Poisson cohorts, and uses a cheap accountant except in tests of ε."""
    monkeypatch.setattr(harness, "Cohorts", lambda n, order=1: PoissonSampler(n))
    if "epsilon" not in request.function.__name__:
        monkeypatch.setattr(client_dp, "LARGE", 0.0)
        monkeypatch.setattr("opacus.accountants.RDPAccountant.DEFAULT_ALPHAS", [2, 4])


def updates(data, method, rounds=1, cohort_of=2, **kwargs):
    """The number of clients and Δ of each round."""
    found = []
    train_rounds(
        make_net(),
        data,
        sgd(),
        rounds=rounds,
        methods=[method],
        cohort_of=cohort_of,
        **kwargs,
        on_round=lambda round, row: found.append(
            (row["train/clients"], [t.clone() for t in round.update.values()])
        ),
    )
    return found


def test_poisson_cohorts_are_independent_draws():
    taken = np.zeros((3000, 6))
    for round_index in range(len(taken)):
        cohort = PoissonSampler(2)(round_index, 6, 3)
        assert (np.diff(cohort) > 0).all()
        taken[round_index, cohort] = 1
    error = 4 * np.sqrt(2 / 9 / len(taken))
    assert taken.mean(0) == pytest.approx(np.full(6, 1 / 3), abs=error)
    pairs = (taken.T @ taken / len(taken))[~np.eye(6, dtype=bool)]
    assert pairs == pytest.approx(np.full(30, 1 / 9), abs=error)


def test_without_noise_a_run_equals_the_clipped_run_bit_for_bit(federation):
    """This holds for full participation. Otherwise the result is the clipped mean times n / qN."""
    clipped = partial(ClipUpdate, 0.05)
    private = partial(ClientDP, 0.05, noise_multiplier=0.0)
    one, other = (
        updates(federation, make(), rounds=2, cohort_of=5)[-1][1] for make in (clipped, private)
    )
    assert all(map(torch.equal, one, other))
    [(n, clip)], [(_, own)] = (updates(federation, make(), seed=1) for make in (clipped, private))
    assert n == 3
    torch.testing.assert_close(own, [t * 3 / 2 for t in clip], rtol=1e-12, atol=0)


class Longer(ClientPart):
    """Sends long updates. That of client 1 is NaN."""

    def send(self, upload, own, download):
        for t in upload.delta.values():
            t.mul_(1e3)
            t[upload.clients == 1] = torch.nan


class Sent(harness.Spy):
    order = Order.MEASURES

    def on_receive(self, upload, round):
        rows = torch.cat([t.flatten(1) for t in upload.delta.values()], 1)[upload.finite]
        self.rows = [*getattr(self, "rows", []), *rows]


def test_no_client_adds_more_than_the_bound():
    """A client that is not finite adds nothing. The sum is always divided by qN."""
    found = []
    sent = Sent()
    method = ClientDP(0.05, noise_multiplier=0.0)
    train_rounds(
        rounds=1,
        methods=[method, Longer(), sent],
        cohort_of=5,
        on_round=lambda round, row: found.append(
            torch.cat([t.flatten() for t in round.update.values()])
        ),
    )
    assert [float(row.norm()) for row in sent.rows] == pytest.approx([0.05] * 4)
    torch.testing.assert_close(found[0], torch.stack(sent.rows).sum(0) / 5, rtol=1e-12, atol=0)


def test_each_round_adds_its_own_noise_even_without_clients(federation):
    assert not len(PoissonSampler(2)(1, 5, 14))  # with this seed, the second round has no client
    some = {"rounds": 2, "seed": 14, "faults": Faults(dropout=0.01)}
    dp = partial(ClientDP, 0.5)
    noisy, plain = (updates(federation, dp(noise_multiplier=s), **some) for s in (1e-7, 0.0))
    assert plain[0][0] > plain[-1][0] == 0
    for round_index in (0, 1):
        random = torch.Generator().manual_seed(torch_seed(14, "privacy", round_index))
        for with_noise, without in zip(noisy[round_index][1], plain[round_index][1], strict=True):
            expected = (
                torch.randn(without.shape, generator=random, dtype=torch.float64) * 1e-7 * 0.5 / 2
            )
            torch.testing.assert_close(with_noise - without, expected, rtol=1e-6, atol=1e-15)


def test_a_resumed_run_with_two_processes_draws_the_same_noise(config, tmp_path):
    def run(folder, rounds, *more):
        small = (
            "model.hidden=[8]",
            "data.limit_train=100",
            "data.limit_test=40",
            "client.epochs=1",
            *more,
        )
        given = ("privacy=client_dp", "privacy.noise_multiplier=0.5", f"rounds={rounds}", *small)
        return final_weights(train(config(*given, folder=tmp_path / folder)))

    straight = run("straight", 2)
    run("resumed", 1)
    assert torch.equal(run("resumed", 2, "ckpt_path=last", *TWO), straight)
    rows = [row["privacy/epsilon_rdp"] for row in read_rows(tmp_path / "resumed/metrics.csv")]
    assert rows == sorted({*rows})
    assert (
        json.loads((tmp_path / "straight/summary.json").read_text())["privacy/epsilon_rdp"]
        == rows[-1]
    )


def epsilon_of(sigma, q, rounds, delta, tight=True):
    """ε by numerical integration, converted as Balle et al. (2020, Theorem 21) or Mironov (2017,
    Proposition 3).
    """
    x = np.linspace(-10 * sigma, 64 + 10 * sigma, 1000)
    bounds = []
    density = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    for a in np.r_[1.1:11:0.1, 11:64]:
        log = density + a * np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        rdp = (log.max() + math.log(np.exp(log - log.max()).sum() * (x[1] - x[0]))) / (a - 1)
        gain = math.log1p(-1 / a) - math.log(a) / (a - 1)
        bounds.append(rounds * rdp - math.log(delta) / (a - 1) + tight * gain)
    return min(bounds)


def accounted(rounds, clients, per_round, **settings):
    method = ClientDP(**settings)
    data = random_federation(sizes=(1,) * clients)
    join_run(
        method,
        make_setup(make_net(), methods=[method], data=data, rounds=rounds, cohort_of=per_round),
    )
    return method.parts[1]


def test_epsilon_agrees_with_published_values_and_another_accountant():
    # Abadi et al. 2016
    assert epsilon_of(4.0, 0.01, 10_000, 1e-5, tight=False) == pytest.approx(1.26, abs=0.005)
    noise = accounted(800, 20, 1, noise_multiplier=1.0)
    assert noise.total["privacy/epsilon_rdp"] == pytest.approx(
        epsilon_of(1.0, 0.05, 800, 1e-5), rel=0.01
    )
    for done in (1, 100):
        assert noise.spent(done) == pytest.approx(epsilon_of(1.0, 0.05, done, 1e-5), rel=0.01)
    for done, expected in ((100, {"privacy/epsilon_rdp": noise.spent(100)}), (800, noise.total)):
        row = {}
        noise.on_round_end(row, replace(make_received({}), index=done - 1))
        assert row == expected
    # Google's dp-accounting, by PLD
    assert noise.total["privacy/epsilon_prv"] == pytest.approx(9.697, rel=0.01)
    assert accounted(3, 5, 2, noise_multiplier=0.0).spent(1) == math.inf


def test_a_target_epsilon_finds_the_noise_for_its_rounds():
    """For full participation, δ is known exactly (Balle & Wang 2018, Theorem 8, with σ / √T)."""

    def delta(epsilon):
        ratio = math.sqrt(3) / noise.sigma
        low, high = (NormalDist().cdf(sign * ratio / 2 - epsilon / ratio) for sign in (-1, 1))
        return high - math.exp(epsilon) * low

    noise = accounted(3, 5, 5, epsilon=2.0)
    assert delta(2.0) <= 1e-5 < delta(1.98)
    assert noise.total["privacy/epsilon_prv"] <= 2.0
    with refuses(r"^rounds=3: privacy\.epsilon=2\.0 needs σ="):
        noise.load_state_dict({"sigma": noise.sigma * 1.1})
    for given in ({}, {"epsilon": 8.0, "noise_multiplier": 1.0}):
        with refuses(r"^epsilon=.* and noise_multiplier=.*: set one of them"):
            ClientDP(**given)


@pytest.mark.parametrize(
    ("methods", "changes", "message"),
    [
        ([Scaffold()], {}, "does not combine with Scaffold, which reads"),
        *(
            (
                [type("Own", (ServerPart,), {hook: print})()],
                {},
                "does not combine with Own, which reads",
            )
            for hook in ("uploads", "notes", "on_receive", "on_aggregate_end", "decode")
        ),
        ([ClipUpdate(quantile=0.5)], {}, "does not combine with ClipUpdate, which reads"),
        ([Quantization()], {}, "does not combine with Quantization, which changes"),
        ([Scale()], {}, "does not combine with Scale, which changes"),
        (
            [type("Own", (ClientPart,), {"order": Order.SHORTENS, "send": print})()],
            {},
            "does not combine with Own, which",
        ),
        (
            [],
            {"module": FederatedModule(harness.with_batch_norm(), harness.PLAIN_SERVER)},
            r".* 1\.running_mean",
        ),
        ([], {"aggregator": Median()}, "needs aggregator=mean, not Median"),
        ([], {"aggregator": MeanAggregator("samples")}, r"needs aggregator\.weighting=uniform"),
        ([], {"sampler": UniformSampler(3)}, "needs participation=poisson"),
        ([], {"faults": Faults(extra=1)}, r"needs participation\.faults\.extra=null"),
        (
            [],
            {"transport": SimpleNamespace(remote=True, separate_clients=True)},
            "needs federation=none",
        ),
    ],
)
def test_settings_that_break_the_guarantee_are_refused(methods, changes, message):
    allowed, refused = (
        make_setup(
            make_net(),
            data=random_federation(),
            methods=[*more, Drift(), ClientDP(noise_multiplier=1.0)],
        )
        for more in ([LookAhead(0.0)], methods)
    )
    validate_parts(allowed)
    with refuses(f"^ClientDP {message}"):
        validate_parts(replace(refused, **changes))


def test_the_noise_has_the_stated_deviation_and_global_gc_removes_one_direction_per_output():
    """Of isotropic noise on a weight [out, in], P removes on average the share 1/in of the squared
    norm.
    """

    def norm(tensors):
        return sum(float(t.square().sum()) for t in tensors)

    net = MLP(input_shape=(20,), num_classes=30, hidden=(40,))
    before = 0.0
    after = 0.0
    runs = 40
    noise = ClientDP(0.3, noise_multiplier=1.7).parts[1]
    gc = GlobalGC()
    setup = make_setup(net, methods=[noise, gc], data=random_federation(features=20))
    gc.bind(setup)
    noise.expected = 8
    noise.trained_names = setup.names
    for seed in range(runs):
        update = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        noise.on_aggregate_end(update, replace(make_received(update), seed=seed))
        before += norm(update.values())
        setup.module.set_update(update)
        gc.on_before_optimizer_step(None, setup.module, None)
        after += norm(p.grad for p in net.parameters())
    outputs = 40 + 30
    entries = sum(p.numel() for p in net.parameters())
    assert before / runs / entries == pytest.approx(
        (1.7 * 0.3 / 8) ** 2, rel=4 * math.sqrt(2 / (entries * runs))
    )
    assert 1 - after / before == pytest.approx(
        outputs / entries, rel=4 * math.sqrt(2 / (outputs * runs))
    )
