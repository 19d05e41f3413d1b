"""The batches of local steps: how an epoch is divided, and what a client fetches."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import ArrayData, plan_of, random_federation

from gcfed.federated.training import batches
from gcfed.federated.training.batches import Kind


@pytest.mark.parametrize(
    ("last_batch", "counts"), [("keep", [4, 4, 1]), ("drop", [4, 4]), ("wrap", [4, 4, 4])]
)
def test_an_epoch_is_divided_as_configured(last_batch, counts):
    data = random_federation(sizes=(9, 3))
    plan = plan_of(data, [0], last_batch=last_batch)
    assert plan.counts.tolist() == [counts * 2]
    epochs = plan.index[0].view(2, -1)
    for epoch in epochs:
        # wrap repeats the first samples at the end
        times = np.bincount(epoch[: sum(counts)], minlength=9)
        assert (
            sorted(times)
            == {"keep": [1] * 9, "drop": [0] + [1] * 8, "wrap": [1] * 6 + [2] * 3}[last_batch]
        )
    assert not torch.equal(epochs[0], epochs[1])
    few = plan_of(data, [1], epochs=1, last_batch=last_batch)
    # a small client keeps its only batch
    assert few.counts.tolist() == [[4 if last_batch == "wrap" else 3]]
    assert (plan_of(data, [0, 1], steps=5, last_batch=last_batch).counts > 0).sum(1).tolist() == [
        5,
        5,
    ]


class Counts(ArrayData):
    """Counts the fetched values, and adds the augmentation's draw to each sample."""

    values: ClassVar = []

    def draw(self, rng, shape):
        return rng.integers(0, 100, (*shape, 1))

    def fetch(self, index, augment):
        x, y = super().fetch(index, augment)
        self.values.append(x.numel())
        return x + augment, y


@pytest.mark.parametrize("ahead", [0, 40, 80, 10**6])  # values; a batch has 20
@pytest.mark.parametrize("clients", [[1], [1, 2]])
def test_a_steps_batch_does_not_depend_on_earlier_steps(monkeypatch, clients, ahead):
    data = random_federation(sizes=(3, 14, 9), features=5)
    data = Counts(data.x, data.y, data.clients)
    monkeypatch.setattr(batches, "VALUES_AHEAD", ahead)
    plan = plan_of(data, clients)
    for step in [*range(8), *range(7, -1, -1), 0, 5, 2, 2, 7, 3]:
        n, size, _ = kind = plan.kinds[step]
        rows = plan.index[:n, step, :size]
        for number in (step, torch.tensor([step])):
            batch = plan.batch(data, number, kind)
            assert torch.equal(batch.x, data.x[rows] + plan.augment[:n, step, :size])
            assert torch.equal(batch.y, data.y[rows])
            # alignment changes the last bits of products on CPUs
            assert batch.x.data_ptr() % 64 == 0
            assert batch.count.tolist() == plan.counts[:n, step].tolist()
        wide = plan.batch(data, step, Kind(n, 4, even=False))  # as FedReg's
        assert torch.equal(wide.x[:, :size], batch.x)
        assert wide.mask.tolist() == [
            [i < count for i in range(4)] for count in plan.counts[:n, step]
        ]


def test_a_client_fetches_no_value_beyond_its_plan(monkeypatch):
    data = random_federation(sizes=(3, 14, 2))
    data = Counts(data.x, data.y, data.clients)
    monkeypatch.setattr(batches, "VALUES_AHEAD", 100)
    for client, cut, expected in ((1, 8, [96, 96]), (1, 5, [96, 24]), (2, 6, [72])):
        plan = plan_of(data, [client], epochs=2 if client == 1 else 6).cut(np.array([cut]))
        data.values.clear()
        for step, kind in enumerate(plan.kinds):
            plan.batch(data, step, kind)
        assert data.values == expected
