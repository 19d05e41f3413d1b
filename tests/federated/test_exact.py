"""Sums do not depend on the order of terms, so a run has the same bits on one, two and three
processes.
"""

import math
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
)

from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.engine.round_sums import RoundSums
from gcfed.federated.engine.server import Server
from gcfed.federated.parallel import sums as sums_module
from gcfed.federated.parallel.sums import LIMIT, Sums
from gcfed.federated.parts.transport import Outcome
from gcfed.federated.protocol.checks import finite_clients
from gcfed.federated.protocol.messages import Expected
from gcfed.federated.state.store import ClientStores
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.objective.fedcurv import FedCurv
from gcfed.methods.server.fedvarp import FedVARP
from gcfed.methods.subspace.fedsub import FedSub
from gcfed.utils.bounds import is_below


class OnGPU(torch.Tensor):
    """Takes the code for a GPU."""

    is_cuda = True
    device = torch.device("cuda")


@pytest.mark.parametrize("kind", [torch.Tensor, OnGPU])
@pytest.mark.parametrize(
    ("narrow", "places", "scale"),
    [(True, 40, 300.0), (False, 60, 1e9), (True, 40, 1e9), (False, 60, 1e16)],
)
def test_all_orders_and_splits_equal_the_sum_of_rounded_terms_bit_for_bit(
    monkeypatch, narrow, places, scale, kind
):
    """The reference uses fractions: each term is rounded to the grid, and the sum is exact."""
    monkeypatch.setattr("gcfed.federated.parallel.sums.PIECE", 64)
    g = torch.Generator().manual_seed(0)
    k = 30
    like = {
        "a": torch.zeros(20, 4, 5),
        "conv": torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
    }
    like |= {"b": torch.zeros(()), "none": torch.zeros(0, 3)}
    values = {n: torch.randn(k, *t.shape, generator=g) * scale for n, t in like.items()}
    weights = torch.randint(1, 900, (k,), generator=g).double() / 1024
    weights[3] = 0.0  # this client is left out and sends NaN
    expected = {}
    for name, t in values.items():
        columns = t.double().reshape(k, -1).T.tolist()
        whole = [
            sum(
                round(Fraction(x) * Fraction(p) * 2**places)
                for x, p in zip(c, weights.tolist(), strict=True)
            )
            for c in columns
        ]
        mean = [float(w) / 2.0**places / float(weights.sum()) for w in whole]
        expected[name] = torch.tensor(mean, dtype=torch.float64).view(like[name].shape).float()
        t[3] = float("nan")
    for processes in (1, 2, 3):
        each = [Sums(like, like if narrow else ()) for _ in range(processes)]
        for rows in torch.randperm(k, generator=g).split(processes):  # stacks of one, two and three
            each[int(rows[0]) % processes].add(
                {n: t[rows] for n, t in values.items()}, weights[rows].as_subclass(kind)
            )
        found = of_first_process([sums.mean for sums in each])
        for name, t in like.items():
            assert torch.equal(found[name], expected[name]), name
            assert found[name].stride() == t.stride()
            assert found[name].dtype == torch.float32


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_mean_with_large_and_small_weights_is_accurate(weighting):
    """Updates have steps of 2⁻⁴⁰, other tensors of 2⁻⁶⁰. Weights by samples run from 1 to 900."""
    g = torch.Generator().manual_seed(1)
    sizes = np.array([1, 900, 3, 40, 7])
    data = random_federation(sizes=tuple(sizes))
    mean = MeanAggregator(weighting)
    mean.bind(make_setup(make_net(dtype=torch.float32), data=data))
    name = next(iter(mean.narrow))
    sent = {
        name: torch.randn(5, 300, generator=g) * 1e-3,
        "statistic": torch.randn(5, 40, generator=g) * 1e6,
    }
    round = replace(make_round({}), cohort=np.arange(5))
    total = mean.new_sum(round)
    total.add(make_upload(sent, sizes))
    found = total.reduce({n: t[0] for n, t in sent.items()})
    p = sizes if weighting == "samples" else np.ones(5)
    for n, t in sent.items():
        exact = torch.tensor(
            [math.fsum(c * p) / p.sum() for c in t.double().numpy().T], dtype=torch.float64
        )
        step = 2.0**-40 * (1024 if weighting == "samples" else 1) if n == name else 2.0**-60
        assert (
            (found[n].double() - exact).abs() <= 5 * step / p.sum() + exact.abs() * 2.0**-24
        ).all()


@pytest.mark.parametrize("kind", [torch.Tensor, OnGPU])
def test_numbers_outside_the_grid_are_not_finite(kind):
    """The limit is 2⁶¹, but not in float64, which needs no grid. Booleans are numbers, too."""
    at = (
        torch.tensor([1.0, -2048.0, 2.0**60, -(2.0**61), float("nan"), float("-inf")])
        .view(6, 1)
        .as_subclass(kind)
    )
    assert finite_clients({"w": at}).tolist() == [True] * 4 + [False] * 2
    sent = {"w": at, "bits": torch.ones(6, 3, dtype=torch.bool), "nothing": torch.zeros(6, 0)}
    assert finite_clients(sent, LIMIT).tolist() == [True, True, True, False, False, False]
    sent["w"] = at.double()
    assert finite_clients(sent, LIMIT).tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("where", ["delta", "extra"])
def test_a_server_checks_the_numbers_of_sites_itself(where):
    """It checks Δ and the extra tensors itself, because the sum would be wrong without an error."""
    upload = make_upload({"w": torch.ones(2, 3)}, np.ones(2), finite=torch.tensor([True, True]))
    upload.send("c", {"w": torch.ones(2, 3)})
    {"delta": upload.delta, "extra": upload.extra["c"]}[where]["w"][1, 0] = 1e30
    mean = MeanAggregator()
    round = make_round({"w": torch.zeros(3)})
    setup = SimpleNamespace(
        parts=[],
        aggregator=mean,
        transport=SimpleNamespace(remote=True),
        module=SimpleNamespace(travels=["w"]),
        names=["w"],
    )
    server = Server(setup, schedule=None, seed=1)
    expected = Expected({"delta": round.broadcast_model, "c": round.broadcast_model}, {})
    means = {"delta": mean.new_sum(round), "c": mean.new_extra_sum(round)}
    sums = RoundSums(expected, means, {}, [], [])
    server.receive(upload, sums, round)
    assert upload.finite.tolist() == [True, False]
    received = server.reduce(sums, round, Outcome())
    assert received.update["w"].tolist() == received.extra_means["c"]["w"].tolist() == [1.0] * 3
    assert received.num_finite == 1


@pytest.mark.parametrize(
    "make", [list, lambda: [FedVARP(), FedCurv()], lambda: [FedSub(ratio=0.5)]]
)
def test_a_run_has_the_same_bits_on_one_and_three_processes(tmp_path, make):
    how = "uniform" if make() else "samples"
    runs = [
        train_rounds(
            make_net(dtype=torch.float32),
            random_federation(dtype=torch.float32),
            sgd(),
            rounds=2,
            methods=make(),
            cohort_of=5,
            world=world,
            stores=ClientStores(folder=tmp_path / str(world)),
            aggregator=MeanAggregator(how),
        )
        for world in (1, 3)
    ]
    assert torch.equal(*runs)


def test_large_updates_count_and_have_the_same_bits_on_one_and_three_processes():
    """A client's update has entries above 2¹¹.

    Only the process that trains it makes the coarse grid.
    """
    ends = []
    lost = []
    for world in (1, 3):
        data = random_federation(dtype=torch.float32)
        data.x[data.clients[0]] *= 1e5
        torch.manual_seed(0)
        ends.append(
            train_rounds(
                torch.nn.Linear(6, 4),
                data,
                sgd(),
                rounds=1,
                cohort_of=5,
                world=world,
                on_round=lambda round, row: lost.append(row["train/nonfinite_clients"]),
            )
        )
    assert not any(lost)
    assert 5 * ends[0].abs().max() > 2**11
    assert torch.equal(*ends)


def test_a_client_whose_numbers_are_outside_the_grid_keeps_and_adds_nothing(tmp_path):
    """The decision comes before the state is written, so client and server agree."""
    data = random_federation(dtype=torch.float32)
    data.x[data.clients[0]] *= 1e21
    rows = []
    stores = ClientStores(folder=tmp_path)
    end = train_rounds(
        torch.nn.Linear(6, 4),
        data,
        sgd(),
        rounds=1,
        methods=[Scaffold()],
        cohort_of=5,
        stores=stores,
        on_round=lambda round, row: rows.append(row["train/nonfinite_clients"]),
    )
    assert rows == [1]
    assert end.isfinite().all()
    like = {"weight": torch.zeros(4, 6), "bias": torch.zeros(4)}
    kept = [
        stores.read("scaffold", np.array([k]), like)["weight"].abs().max().item() for k in range(5)
    ]
    assert kept[0] == 0 < min(kept[1:])


@pytest.mark.parametrize("k", [1, 3])
def test_the_finite_check_reads_images_as_vectors(k, monkeypatch):
    """It finds a NaN at any place."""
    seen = []
    plain = torch.linalg.vector_norm

    def spy(t):
        seen.append(t.dim())
        return plain(t)

    monkeypatch.setattr(torch.linalg, "vector_norm", spy)
    for place in range(4 * 3 * 5 * 5):
        image_K = torch.zeros(k, 4, 5, 5, 3).movedim(-1, 2)
        image_K[k - 1].permute(0, 2, 3, 1).view(-1)[place] = float("nan")
        tensors_K = {"image": image_K, "bias": torch.zeros(k, 7)}
        assert finite_clients(tensors_K).tolist() == [True] * (k - 1) + [False]
    assert set(seen) == {1}


def test_the_processes_exchange_all_sums_at_once(monkeypatch):
    """Each exchange waits for the slowest process."""
    like = {"narrow": torch.ones(2), "wide": torch.ones(3), "exact": torch.ones(2).double()}
    sums = Sums(like, {"narrow"})
    sums.add({name: t.unsqueeze(0) for name, t in like.items()}, torch.ones(1).double())
    exchanges = []

    def sum_over_two(tensors):
        exchanges.append(len(tensors))
        return [2 * t for t in tensors]  # of two equal processes

    monkeypatch.setattr(sums_module, "sum_over_processes", sum_over_two)
    total, weight = sums.total()
    assert len(exchanges) == 1
    assert {name: t.tolist() for name, t in total.items()} == {
        "narrow": [2, 2],
        "wide": [2, 2, 2],
        "exact": [2, 2],
    }
    assert weight == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_bound_holds_for_every_number(dtype):
    """The norm of many numbers may exceed the bound, or overflow, although each is below it."""
    for limit in (math.inf, 2.0**61, 2.0**11):
        for size in (1.0, 1e3, 1e30):
            numbers = (size * torch.randn(3, 500)).to(dtype)
            for number in (0.0, math.nan, math.inf, -math.inf, limit, -limit, 0.99 * limit):
                numbers[1, 7] = number
                largest = float(numbers.double().abs().max())
                assert is_below(numbers, limit) == (largest < limit)
    integers = torch.tensor([-3, 2])
    assert [is_below(integers, limit) for limit in (3, 4)] == [False, True]
