"""Finite numbers are added as they are, whatever their size; if not, the tensor and the limit are
named.
"""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import (
    make_net,
    make_round,
    make_setup,
    make_upload,
    of_first_process,
    random_federation,
    sgd,
    train_rounds,
    with_batch_norm,
)
from torch import nn

from gcfed.aggregators.mean import MeanAggregator
from gcfed.aggregators.norm_clip import NormClip
from gcfed.attacks.byzantine import Scale
from gcfed.federated.engine.explanations import Explanations
from gcfed.federated.parallel.sums import Sums
from gcfed.federated.protocol.rounds import Round
from gcfed.methods.upload.clip_update import ClipUpdate
from gcfed.metrics.updates import Gap
from gcfed.participation.sampling import PoissonSampler

SIZES = 10.0 ** np.arange(-12, 16)


@pytest.mark.parametrize("narrow", [True, False])
def test_terms_of_27_magnitudes_have_one_sum_in_every_order_on_one_and_two_processes(narrow):
    """Each entry's sum equals that of fractions, to the rounding of the finest grid."""
    g = torch.Generator().manual_seed(2)
    values = torch.randn(len(SIZES), 50, generator=g) * torch.from_numpy(SIZES).float()[:, None]
    like = {"w": torch.zeros(50)}
    found = []
    for seed in range(6):
        order = torch.randperm(len(SIZES), generator=g.manual_seed(seed))
        halves = [order] if seed < 3 else [order[::2], order[1::2]]
        each = [Sums(like, like if narrow else ()) for _ in halves]
        for sums, rows in zip(each, halves, strict=True):
            for row in rows:
                sums.add({"w": values[row : row + 1]}, torch.ones(1, dtype=torch.float64))
        totals, _ = of_first_process([sums.total for sums in each])
        found.append(totals["w"])
    assert all(torch.equal(found[0], other) for other in found[1:])
    step = Fraction(1, 2**40 if narrow else 2**60)
    for column, total in zip(values.T.tolist(), found[0].tolist(), strict=True):
        exact = sum(map(Fraction, column))
        assert abs(Fraction(total) - exact) <= len(SIZES) * step + abs(exact) * Fraction(1, 2**52)


def mean_of_equal(mean, setup, largest, samples, **changes):
    """The mean of updates that are all ``largest``, from clients with these ``samples``."""
    mean.bind(setup)
    name = next(iter(mean.narrow))
    round = replace(make_round({}), **changes)
    sent = {name: torch.full((len(samples), 1), largest)}
    total = mean.new_sum(round)
    total.add(make_upload(sent, samples))
    return total.reduce({name: torch.zeros(1)})[name].item()


@pytest.mark.parametrize("largest", [2047.9, 2.0**60.9])
@pytest.mark.parametrize("clients", [4095, 4096, 8191, 8192, 20_000])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_mean_of_many_equal_updates_is_their_number(weighting, clients, largest):
    """A sum of more than 4,096 of the largest terms would leave the 64 bits of the grid."""
    data = random_federation(sizes=(7, 900))
    setup = make_setup(make_net(dtype=torch.float32), data=data, cohort_of=clients)
    samples = np.full(clients, 900)
    cohort = np.full(clients, 1)  # the client with 900 samples
    found = mean_of_equal(MeanAggregator(weighting), setup, largest, samples, cohort=cohort)
    assert found == pytest.approx(largest, rel=1e-6)


def test_a_mean_has_room_for_the_largest_round_of_a_poisson_sampler():
    """``per_round`` is the mean number of clients: here 4,095, and this round has 4,300."""
    setup = make_setup(make_net(dtype=torch.float32), data=random_federation())
    setup = replace(setup, sampler=PoissonSampler(4095))
    cohort = np.zeros(4300, int)
    found = mean_of_equal(MeanAggregator(), setup, 2047.9, np.full(4300, 1), cohort=cohort)
    assert found == pytest.approx(2047.9, rel=1e-6)


def end_of_round(factor=None, methods=(), unit=1.0, **solver):
    """The weights after a round of five clients in float32, and how many of them do not count."""
    data = random_federation(dtype=torch.float32)
    data.x = data.x / unit
    lost = []
    torch.manual_seed(0)
    attack = [] if factor is None else [Scale(clients=0.4, factor=factor)]
    end = train_rounds(
        nn.Linear(6, 4),
        data,
        sgd(**solver),
        rounds=1,
        cohort_of=5,
        methods=[*attack, *methods],
        on_round=lambda round, row: lost.append(row["train/nonfinite_clients"]),
    )
    return end.double(), lost[0]


@pytest.mark.parametrize("factor", [1e3, 1e4, 1e5, 1e6, 1e12])
def test_an_attack_of_any_size_reaches_the_plain_mean(factor):
    honest, _ = end_of_round()
    tenfold, _ = end_of_round(10.0)
    attacked, lost = end_of_round(factor)
    assert lost == 0
    expected = honest + (tenfold - honest) * (factor - 1) / 9  # linear in the factor
    error = (attacked - expected).norm() / (expected - honest).norm()
    assert error < 1e-4


def test_updates_are_checked_after_the_edits_of_methods():
    """Unclipped, these are too large for a sum."""
    one_step = {"unit": 1e-20, "epochs": None, "steps": 1}
    assert end_of_round(**one_step)[1] == 5
    clipped, lost = end_of_round(**one_step, methods=[ClipUpdate(max_norm=1.0)])
    assert lost == 0
    assert clipped.isfinite().all()


def test_a_mean_by_samples_is_exact_for_small_clients_beside_a_large_one():
    """The grid of a round is as fine as its own clients allow."""
    sizes = np.array([1, 3, 2**20])
    setup = SimpleNamespace(
        transport=SimpleNamespace(own_data=False),
        data=SimpleNamespace(sizes=lambda clients: sizes[clients]),
        parts=[],
        names=["w"],
    )
    mean = MeanAggregator("samples")
    mean.bind(setup)
    delta = torch.tensor([[1e-5, 2e-6], [-3e-6, 1e-7]])
    for cohort, weights in (([0, 1], [1, 3]), ([0, 2], [1, 2**20]), ([0, 1], [1, 3])):
        upload = SimpleNamespace(
            delta={"w": delta}, finite=torch.ones(2).bool(), num_samples=np.array(weights)
        )
        round = SimpleNamespace(cohort=np.array(cohort))
        total = mean.new_sum(round)
        total.add(upload)
        found = total.reduce({"w": delta[0]})["w"]
        expected = np.average(delta.double().numpy(), axis=0, weights=weights)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["new_sum", "new_extra_sum"])
@pytest.mark.parametrize(
    "aggregator", [MeanAggregator(), MeanAggregator("samples"), NormClip(max_norm=1.0)]
)
def test_a_sum_fits_its_grid_for_any_size_of_the_cohort(aggregator, kind):
    """20,000 terms near half a step of the first grid need two bits more than the second has."""
    clients = np.arange(20_000)
    value = torch.full((len(clients), 1), 0.00048)
    upload = make_upload({"w": value}, np.ones_like(clients))
    total = getattr(aggregator, kind)(SimpleNamespace(cohort=clients))
    total.add(upload)
    found = total.reduce({"w": value[0]})["w"]
    np.testing.assert_allclose(found.numpy(), 0.00048, rtol=1e-6)


def test_the_mean_over_all_clients_fits_its_grid_beside_a_small_cohort(monkeypatch):
    """``metrics=gap`` sums over the cohort, and over the whole population."""
    clients = np.arange(20_000)
    value = torch.full((len(clients), 1), 0.00048)
    gap = Gap()
    gap.aggregator = MeanAggregator()
    gap.names = ["w"]
    gap.module = SimpleNamespace(
        device=torch.device("cpu"),
        trainer=SimpleNamespace(strategy=SimpleNamespace(barrier=lambda: None)),
    )

    def rehearse(download, others):
        yield make_upload({"w": value[: len(others)]}, np.ones_like(others))

    gap.transport = SimpleNamespace(rehearse=rehearse)
    model = {"w": torch.zeros(1)}
    cohort = clients[:2]
    round = Round(0, 1, cohort, len(clients), model, 0.1, versions=np.zeros_like(cohort))
    gap.begin(None, round)
    gap.take(make_upload({"w": value[:2]}, np.ones_like(cohort)), round)
    for mean in (gap.partial, gap.full):
        np.testing.assert_allclose(mean.reduce(model)["w"].numpy(), 0.00048, rtol=1e-6)


def warning_of_large_inputs(caplog, world=1):
    """The warning of a round in which the second of three clients has too large inputs."""
    data = random_federation(sizes=(4, 12, 8), dtype=torch.float32)
    data.x[data.clients[1]] *= 1e11
    train_rounds(with_batch_norm().float(), data, rounds=1, cohort_of=3, world=world)
    (warning,) = [text for text in caplog.messages if text.startswith("round 1:")]
    return warning


@pytest.mark.parametrize("world", [1, 2])
def test_the_advice_is_that_of_the_process_that_trained_the_client(world, caplog):
    """The largest client has inputs in a unit that is too small. With two processes, the second
    one trains it, and the first one warns.
    """
    warning = warning_of_large_inputs(caplog, world)
    assert "1 of 3 clients" in warning
    assert "client.optimizer.lr" not in warning


def test_without_an_explanation_the_advice_names_both_causes(caplog, monkeypatch):
    """As on a GPU, where the host does not wait for the uploads of each stack."""
    monkeypatch.setattr(Explanations, "explain", lambda self, upload: None)
    warning = warning_of_large_inputs(caplog)
    assert "1 of 3 clients" in warning
    assert "Scale the inputs if their numbers are large; otherwise lower" in warning
    assert "client.optimizer.lr" in warning
