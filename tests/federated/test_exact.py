"""Sums in float32 know no order, so that a run has the same bits on one, two and three processes."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import random_federation
from harness import make_net, make_round, make_upload, sgd, train_rounds

from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.exact import ExactSum
from gcfed.federated.store import ClientStores
from gcfed.methods.fedcurv import FedCurv
from gcfed.methods.feddyn import FedDyn
from gcfed.methods.fedgc import FedGC
from gcfed.methods.fedsub import FedSub
from gcfed.methods.fedvarp import FedVARP
from gcfed.methods.scaffold import Scaffold
from gcfed.methods.ssf import SSF


@pytest.mark.parametrize("shape", [(400,), (20, 4, 5), ()])
@pytest.mark.parametrize(("bins", "unit"), [(2, 1.0), (3, 1.0), (3, 1e-13)])
def test_every_order_and_split_has_the_bits_of_the_exact_sum(monkeypatch, shape, bins, unit):
    monkeypatch.setattr("gcfed.federated.exact.PIECE", 64)
    g, k = torch.Generator().manual_seed(0), 30
    scale = unit * 10.0 ** torch.randint(-16 if unit == 1 else -5, 1, (k, *shape), generator=g)
    values, weights = torch.randn(k, *shape, generator=g) * scale, torch.randint(1, 900, (k,), generator=g).double()
    weights[3] = 0.0  # a client that is left out, whatever it sends
    terms = (values.double().reshape(k, -1) * weights[:, None]).T.tolist()
    exact = torch.tensor([math.fsum(row) for row in terms], dtype=torch.float64).view(shape) / weights.sum()
    values[3] = float("inf")
    for processes in (1, 2, 3):
        sums = [ExactSum(values[0], bins) for _ in range(processes)]
        for rows in torch.randperm(k, generator=g).split(processes):  # stacks of one, two and three
            one = sums[int(rows[0]) % processes]
            (one._add_each if int(rows[0]) % 2 else one._add_together)(values[rows], weights[rows])
        sums[0].parts = [sum(parts) for parts in zip(*(s.parts for s in sums), strict=True)]
        mean = sums[0].over(weights.sum())
        assert mean.dtype == torch.float32
        assert torch.equal(mean, exact.float())


@pytest.mark.parametrize("unit", [1.0, 1e-13])
def test_what_goes_beside_an_update_has_all_its_digits_however_small(unit):
    """As FedCurv's squared gradients, whose mean of 10⁻¹³ had four digits."""
    g = torch.Generator().manual_seed(1)
    sent = {"f": torch.rand(7, 500, generator=g) * unit}
    upload = make_upload(sent, np.ones(7))
    expected = torch.tensor([math.fsum(column) / 7 for column in sent["f"].double().T.tolist()])
    for order in (range(7), range(6, -1, -1)):
        mean = MeanAggregator("samples").beside()
        for i in order:
            mean.add(replace(upload, delta={"f": sent["f"][[i]]}, clients=[i], finite=upload.finite[[i]]), None)
        assert torch.equal(mean.reduce(make_round({}), {"f": torch.zeros(500)})["f"], expected)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_cancels_leaves_the_rest(order):
    """Where float64 loses it, added to the first of the two."""
    terms, exact, plain = (
        torch.tensor([[1.0], [-1.0], [3 * 2.0**-54]]),
        *(ExactSum(torch.zeros(1), bins) for bins in (2, 1)),
    )
    for i in order:
        for total in (exact, plain):
            total.add(terms[i : i + 1], torch.ones(1, dtype=torch.float64))
    found = [total.over(torch.ones((), dtype=torch.float64)).item() for total in (exact, plain)]
    assert found[0] == 3 * 2.0**-54
    assert (found[1] == found[0]) == (order[2] == 2)


@pytest.mark.parametrize(
    "make", [list, lambda: [Scaffold()], lambda: [FedDyn()], lambda: [FedVARP()], lambda: [FedGC()],
             lambda: [SSF(ratio=0.5)], lambda: [FedSub(ratio=0.5)], lambda: [FedCurv()]],
)  # fmt: skip
def test_a_run_has_the_same_bits_on_one_two_and_three_processes(tmp_path, make):
    runs, weighting = [], "uniform" if make() else "samples"
    for world in (1, 2, 3):
        runs.append(
            train_rounds(
                make_net(dtype=torch.float32), random_federation(dtype=torch.float32), sgd(), rounds=4, methods=make(),
                cohort_of=5, world=world, stores=ClientStores(folder=tmp_path / str(world)),
                aggregator=MeanAggregator(weighting),
            )
        )  # fmt: skip
    assert torch.equal(runs[1], runs[0])
    assert torch.equal(runs[2], runs[0])
