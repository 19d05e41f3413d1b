"""Sums in float32 know no order, so that a run has the same bits on one, two and three processes."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import make_net, make_round, make_upload, random_federation, sgd, train_rounds

from gcfed.federated.aggregate import ExactSum, MeanAggregator, means
from gcfed.federated.processes import sums
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
    monkeypatch.setattr("gcfed.federated.aggregate.PIECE", 64)
    g, k = torch.Generator().manual_seed(0), 30
    scale = unit * 10.0 ** torch.randint(-16 if unit == 1 else -5, 1, (k, *shape), generator=g)
    values, weights = torch.randn(k, *shape, generator=g) * scale, torch.randint(1, 900, (k,), generator=g).double()
    weights[3] = 0.0  # a client that is left out, whatever it sends
    terms = (values.double().reshape(k, -1) * weights[:, None]).T.tolist()
    exact = torch.tensor([math.fsum(row) for row in terms], dtype=torch.float64).view(shape) / weights.sum()
    values[3] = float("inf")
    for processes in (1, 2, 3):
        each = [ExactSum(values[0], bins) for _ in range(processes)]
        for rows in torch.randperm(k, generator=g).split(processes):  # stacks of one, two and three
            one = each[int(rows[0]) % processes]
            (one._add_each if int(rows[0]) % 2 else one._add_together)(values[rows], weights[rows])
        each[0].parts = [sum(parts) for parts in zip(*(s.parts for s in each), strict=True)]
        (mean,) = means(each[:1], make_round({}), weights.sum())
        assert mean.dtype == torch.float32
        assert torch.equal(mean, exact.float())


def test_tensors_that_are_joined_have_the_sums_that_they_have_alone(monkeypatch):
    """As on a GPU; in the memory format of the model, and those of another type apart."""
    monkeypatch.setattr("gcfed.federated.aggregate.PIECE", 64)
    g = torch.Generator().manual_seed(2)
    like = {"conv": torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last), "one": torch.zeros(())}
    like |= {"large": torch.zeros(9, 9), "exact": torch.zeros(3, dtype=torch.float64), "bias": torch.zeros(5)}
    delta = {name: torch.randn(7, *t.shape, generator=g).to(t.dtype) for name, t in like.items()}
    delta["bias"][3] = float("nan")
    upload = make_upload(delta, np.arange(1, 8))
    ends = []
    for joins in (False, True):
        monkeypatch.setattr("gcfed.federated.aggregate.joins", lambda device, joins=joins: joins)
        mean = MeanAggregator("samples")
        for rows in ([0, 1, 2], [3], [6, 5, 4]):
            sent = {name: t[rows] for name, t in delta.items()}
            part = replace(upload, delta=sent, num_samples=upload.num_samples[rows], finite=upload.finite[rows])
            mean.add(part, None)
        assert sorted(mean._sums) == (["large", "torch.float32", "torch.float64"] if joins else sorted(like))
        ends.append(mean.reduce(make_round({}), like))
    for name, t in like.items():
        assert torch.equal(ends[0][name], ends[1][name]), name
        assert ends[1][name].stride() == t.stride()
        assert ends[1][name].abs().sum() > 0


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
    found = [t.item() for t in means([exact, plain], make_round({}))]
    assert found[0] == 3 * 2.0**-54
    assert (found[1] == found[0]) == (order[2] == 2)


@pytest.mark.parametrize(
    "make", [list, lambda: [Scaffold()], lambda: [FedDyn()], lambda: [FedVARP()], lambda: [FedGC()],
             lambda: [SSF(ratio=0.5)], lambda: [FedSub(ratio=0.5)], lambda: [FedCurv()]],
)  # fmt: skip
def test_a_run_has_the_same_bits_on_one_two_and_three_processes(tmp_path, monkeypatch, make):
    """Of three each finishes a share of the sums' entries, some at a time; two send each other all, in one message."""
    runs, weighting = [], "uniform" if make() else "samples"
    for world in (1, 2, 3):
        monkeypatch.setattr(sums, "SMALL", 0 if world == 3 else 1 << 18)
        monkeypatch.setattr(sums, "BLOCK", 10)
        runs.append(
            train_rounds(
                make_net(dtype=torch.float32), random_federation(dtype=torch.float32), sgd(), rounds=4, methods=make(),
                cohort_of=5, world=world, stores=ClientStores(folder=tmp_path / str(world)),
                aggregator=MeanAggregator(weighting),
            )
        )  # fmt: skip
    assert torch.equal(runs[1], runs[0])
    assert torch.equal(runs[2], runs[0])


def test_a_share_of_the_entries_at_a_time_makes_the_whole(monkeypatch):
    """In the type of what was made and the layout of the parts, whatever a block of entries cuts in two."""
    monkeypatch.setattr(sums, "SMALL", 0)
    monkeypatch.setattr(sums, "BLOCK", 5)
    monkeypatch.setattr(sums, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(sums, "sum_over_processes", lambda tensors: [3 * t for t in tensors])
    blocks = []

    def share(parts, finish):
        blocks.append(len(parts[0]))
        return finish(parts)

    monkeypatch.setattr(sums, "_finish_share", share)
    shapes = (4, 3, 2, 2), (0,), (), (7,)
    pairs = [[torch.randn(shape, dtype=torch.float64) for _ in range(2)] for shape in shapes]
    pairs[0] = [t.to(memory_format=torch.channels_last) for t in pairs[0]]
    made = sums.finish_over_processes(pairs, lambda two: lambda p: (p[0] - two * p[1]).float(), torch.tensor(2.0))
    for (a, b), found in zip(pairs, made, strict=True):
        assert torch.equal(found, (a - 6 * b).float())
        assert found.stride() == a.stride()
    assert blocks == [5] * 11 + [1]
