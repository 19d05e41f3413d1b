"""On a GPU, the host waits as often in a round of many clients as in one of few."""

import numpy as np
import pytest
import torch
from harness import ALGORITHMS, FEW_INNER_STEPS, LATE
from waits import Numbers, OnGPU, Places, from_numpy, waits_of_rounds

from gcfed.run import train
from gcfed.utils.device import on_device

TINY = (
    "model.hidden=[12,8]",
    "rounds=3",
    "participation.sampler._target_=waits.Growing",
    "participation.num_clients=6",
    "participation.per_round=4",
    "client.epochs=null",
    "client.steps=2",
    "client.batch_size=8",
    "client.graphs=false",
    "data.limit_train=92",
    "data.limit_test=40",
    "eval_every=3",
    "callbacks.checkpoint.every=9",
)

# Rounds of late clients have a sampler of their own. SSF keeps full variates on the CPU.
IN_TURN = sorted({*ALGORITHMS} - {*LATE, "ssf"})


@pytest.mark.parametrize("algorithm", IN_TURN)
def test_the_host_does_not_wait_for_each_client(config, monkeypatch, tmp_path, algorithm):
    words = (*TINY, f"algorithm={algorithm}", *FEW_INNER_STEPS.get(algorithm, ()))
    cfg = config(*words, folder=tmp_path / "run")
    _, few, many = waits_of_rounds(monkeypatch, lambda: train(cfg))
    assert few  # for the numbers of the round
    more = many - few
    assert not more, f"waits that grow with the number of clients: {dict(more)}"


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.isfinite().all()),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: t.numpy(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.equal(t + 1),
        lambda t: t[np.array([0])],
        lambda t: t.copy_(torch.ones(3)),
        lambda t: torch.tensor([1.0], device=t.device),
        lambda t: torch.ones(3).to(t.device),
        lambda t: torch.from_numpy(np.ones(3)).to(t.device),
    ],
)
def test_each_kind_of_wait_is_noted(monkeypatch, wait):
    assert waits_in(monkeypatch, wait)


@pytest.mark.parametrize(
    "work",
    [
        lambda t: t + torch.zeros(3, device=t.device),
        lambda t: torch.ones(3).tolist(),
        lambda t: torch.from_numpy(np.ones(3)).sum().item(),
        lambda t: on_device(np.array([0]), t.device),
        lambda t: t[on_device(np.array([0]), t.device)],
        lambda t: t.masked_fill(t > 0, 0.0),
    ],
)
def test_other_work_is_not_noted(monkeypatch, work):
    assert not waits_in(monkeypatch, work)


def waits_in(monkeypatch, function):
    """What is noted of a function that gets a tensor on the device."""
    places = Places()
    monkeypatch.setattr(Places, "note", lambda self, what: self.update([what]))
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    t = torch.ones(3)
    with Numbers(places), OnGPU(places):
        assert t.is_cuda
        function(t)
    return places
